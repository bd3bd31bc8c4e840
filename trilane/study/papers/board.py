"""The scoreboard: figures in each way in which they are asked, and their scores by source and over several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any, NamedTuple

from trilane.study.papers.calibrations import Calibrations
from trilane.study.papers.figures import published
from trilane.study.papers.paper import AskingWay
from trilane.study.papers.plays import Plays
from trilane.study.papers.scores import FAR, NEAR, FigureScore, facts_of, result_of, score_of
from trilane.study.papers.sources import further_sources, read_papers, source_of
from trilane.study.papers.ways import ways_of

DEAD_BAND = 0.03  # published values that differ by less are no pair, of any paper


class Count(NamedTuple):
    """``those`` of so many."""

    those: int
    of: int


@dataclass(frozen=True)
class ScoreSummary:
    """Scores of some figures in one way. ``put_in`` and ``follow``: figures that are not counted; ``follow_far``:
    those that follow and are within 30 %. ``in_order``: see ``pairs_of``."""

    figures: int
    put_in: int
    follow: int
    follow_far: int
    near: float
    far: float
    median_log_ratio: float
    in_range: Count
    same_direction: Count
    in_order: Count

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; shares of no figures are null."""
        shares = {name: value for name, value in vars(self).items() if isinstance(value, float)}
        return {**vars(self), **{name: None if math.isnan(value) else value for name, value in shares.items()}}


def summary(scores: Sequence[FigureScore]) -> ScoreSummary:
    """Directions and pairs are those of all figures that were not put in."""
    counted, own = [s for s in scores if s.counts], [s for s in scores if s.played and not s.put_in]
    follow = [score for score in own if score.follows]
    pairs = pairs_of(own)
    near, far = (fmean([score.within(limit) for score in counted] or [math.nan]) for limit in (NEAR, FAR))
    return ScoreSummary(
        len(counted), sum(bool(score.put_in) for score in scores), len(follow), sum(s.within(FAR) for s in follow),
        near, far, median([abs(score.log_ratio) for score in counted] or [math.nan]),
        in_range=_count(score.in_range for score in counted), same_direction=_count(s.same_direction for s in own),
        in_order=_count(in_order(*pair) for pair in pairs),
    )


def _count(answers: Iterable[bool | None]) -> Count:
    known = [answer for answer in answers if answer is not None]
    return Count(sum(known), len(known))


# --- the board --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scoreboard:
    """Scores of figures, in their order, by way; a source without engines of its own has none as studied."""

    scores: Mapping[AskingWay, Sequence[FigureScore]]

    def of(self, way: AskingWay, names: Iterable[str], timed: bool = False) -> list[FigureScore]:
        """Scores of the sources with these names; ``timed``: times and ratios alone."""
        return [one for one in self.scores[way] if one.paper.name in names and (one.timed or not timed)]

    @property
    def names(self) -> list[str]:
        """The sources, in the order of their figures."""
        ways = reversed(AskingWay)  # all figures are asked with nothing put in
        return list(dict.fromkeys(one.paper.name for way in ways for one in self.scores[way]))

    @property
    def groups(self) -> dict[str, list[str]]:
        """The names of the five papers and of further sources, as far as they are asked; a single one by its name."""
        groups = {"the five papers": read_papers(), "further sources": further_sources()}
        found = {title: [name for name in self.names if name in sources] for title, sources in groups.items()}
        return {title if len(names) > 1 else names[0]: names for title, names in found.items() if names}

    def summaries(self, names: Iterable[str], timed: bool = False) -> dict[AskingWay, ScoreSummary]:
        """In each way in which these sources are asked."""
        scores = {way: self.of(way, names, timed) for way in AskingWay}
        return {way: summary(own) for way, own in scores.items() if own}

    def furthest(self, way: AskingWay = AskingWay.STUDIED) -> list[FigureScore]:
        """Scores that go the wrong way, and those outside the wider band; each the worst first."""
        far = [one for one in self.scores[way] if one.counts and (one.wrong_way or not one.within(FAR))]
        return sorted(far, key=lambda one: (not one.wrong_way, -abs(one.log_ratio)))

    @property
    def not_played(self) -> list[FigureScore]:
        """Figures whose plays are missing in some way."""
        missing = (one for own in self.scores.values() for one in own if not one.played)
        return list({one.figure.id: one for one in missing}.values())

    @property
    def left_out(self) -> dict[str, int]:
        """How many figures of these sources are not asked, by reason, the most frequent first."""
        reasons = [one.left_out for one in published().values() if one.paper in self.names and one.left_out]
        return dict(Counter(reasons).most_common())

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        by_group = {**self.groups, **{name: [name] for name in self.names}}
        by_figure: dict[str, dict[str, Any]] = {}
        for way, own in self.scores.items():
            for one in own:
                facts = by_figure.setdefault(one.figure.id, {**facts_of(one), "ways": {}})
                facts["ways"][way.value] = result_of(one)
        return {
            "scores": {title: {way.value: one.to_dict() for way, one in self.summaries(names).items()}
                       for title, names in by_group.items()},
            "figures": list(by_figure.values()), "left_out": self.left_out,
        }


def scoreboard(
    figure_ids: Sequence[str], plays: Plays, calibrations: Calibrations | None = None
) -> Scoreboard:
    """Score figures by plays that are there, in all ways. ``calibrations``: None: those that come with the program."""
    scores: dict[AskingWay, list[FigureScore]] = {way: [] for way in AskingWay}
    for figure_id in figure_ids:
        paper = source_of(figure_id)
        for way in ways_of(paper, paper.asked[figure_id]):
            scores[way].append(score_of(figure_id, plays, way, calibrations))
    return Scoreboard(scores)


# --- pairs ------------------------------------------------------------------------------------------------------------


def pairs_of(scores: Iterable[FigureScore]) -> list[tuple[FigureScore, FigureScore]]:
    """Figures of one paper that ask the same but for one thing, with published values that differ by more than 3 %, and
    by more than figures do that the paper calls the same.

    The two ends of one range are no pair: the greater end is greater whatever is played.
    """
    return [
        pair
        for pair in combinations((score for score in scores if score.simulated is not None), 2)
        if pair[0].paper.name == pair[1].paper.name and _one_differs(*(score.question.facts for score in pair))
        and _apart(pair[0].figure.value, pair[1].figure.value, max(DEAD_BAND, pair[0].paper.scatter))
    ]


def _one_differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    different = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return len(different) == 1 and different[0] not in ("ask", "take")


def _apart(one: float | None, other: float | None, band: float) -> bool:
    return one is not None and other is not None and abs(one - other) > band * min(abs(one), abs(other))


def in_order(one: FigureScore, other: FigureScore) -> bool:
    """True if the simulated values are in the order of the published ones."""
    assert None not in (one.simulated, other.simulated, one.figure.value, other.figure.value)
    return (one.simulated > other.simulated) == (one.figure.value > other.figure.value)  # type: ignore[operator]
