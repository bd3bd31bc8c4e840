"""The scoreboard: what simulated and published figures have in common, by paper."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

from trilane.study.papers.plays import Plays
from trilane.study.papers.published import read_figures
from trilane.study.papers.scores import FAR, NEAR, FigureScore, facts_of, score_of

DEAD_BAND = 0.03  # published values that differ by less are no pair, of any paper


@dataclass(frozen=True)
class PaperSummary:
    """Scores of the figures of one paper, or of all. Pairs: see ``pairs_of``."""

    name: str
    figures: int
    put_in: int
    near: float
    far: float
    median_log_ratio: float
    same_direction: tuple[int, int]  # of
    in_order: tuple[int, int]


@dataclass(frozen=True)
class Scoreboard:
    """All scores that were asked for, in the order of the figures."""

    scores: Sequence[FigureScore]

    def summaries(self) -> list[PaperSummary]:
        """One a paper, and one for all of several."""
        names = list(dict.fromkeys(score.paper.name for score in self.scores))
        groups = {name: [score for score in self.scores if score.paper.name == name] for name in names}
        if len(names) > 1:
            groups["all"] = list(self.scores)
        found = (_summary(name, scores) for name, scores in groups.items())
        return [summary for summary in found if summary.figures]

    def furthest(self, beyond: float = FAR) -> list[FigureScore]:
        """Scores that go the wrong way, and those outside a band; each the worst first."""
        far = [score for score in self.scores if score.counts and (score.wrong_way or not score.within(beyond))]
        return sorted(far, key=lambda score: (not score.wrong_way, -abs(score.log_ratio)))

    @property
    def not_played(self) -> list[FigureScore]:
        """Figures whose plays are missing."""
        return [score for score in self.scores if score.simulated is None]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"papers": [vars(each) for each in self.summaries()], "figures": [facts_of(s) for s in self.scores],
                "left_out": left_out(self.scores)}


def left_out(scores: Sequence[FigureScore]) -> dict[str, int]:
    """How many figures of these papers are not asked, by reason, the most frequent first."""
    papers = {score.paper.name for score in scores}
    reasons = [figure.left_out for figure in read_figures().values() if figure.paper in papers and figure.left_out]
    return dict(Counter(reasons).most_common())


def scoreboard(figure_ids: Sequence[str], plays: Plays) -> Scoreboard:
    """Score figures by plays that are there."""
    return Scoreboard([score_of(figure_id, plays) for figure_id in figure_ids])


# --- summaries --------------------------------------------------------------------------------------------------------


def _summary(name: str, scores: Sequence[FigureScore]) -> PaperSummary:
    counted = [score for score in scores if score.counts]
    directions = [same for score in counted if (same := score.same_direction) is not None]
    pairs = pairs_of(counted)
    near, far = (fmean([score.within(limit) for score in counted] or [math.nan]) for limit in (NEAR, FAR))
    return PaperSummary(
        name, len(counted), sum(bool(score.put_in) for score in scores), near, far,
        median_log_ratio=median([abs(score.log_ratio) for score in counted] or [math.nan]),
        same_direction=(sum(directions), len(directions)),
        in_order=(sum(in_order(*pair) for pair in pairs), len(pairs)),
    )


def pairs_of(scores: Iterable[FigureScore]) -> list[tuple[FigureScore, FigureScore]]:
    """Figures of one paper that ask the same but for one thing, with published values that differ by more than 3 %, and
    by more than figures do that the paper calls the same.

    The two ends of one range are no pair: the greater end is greater whatever is played.
    """
    return [
        pair
        for pair in combinations(scores, 2)
        if pair[0].paper.name == pair[1].paper.name and _one_differs(*(score.question.facts for score in pair))
        and _apart(pair[0].figure.value, pair[1].figure.value, max(DEAD_BAND, pair[0].paper.scatter))
    ]


def _one_differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    different = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return len(different) == 1 and different[0] not in ("ask", "take")


def _apart(one: float | None, other: float | None, band: float) -> bool:
    return one is not None and other is not None and abs(one - other) > band * min(abs(one), abs(other))


def in_order(one: FigureScore, other: FigureScore) -> bool:
    """Whether the simulated values are in the order of the published ones."""
    assert None not in (one.simulated, other.simulated, one.figure.value, other.figure.value)
    return (one.simulated > other.simulated) == (one.figure.value > other.figure.value)  # type: ignore[operator]
