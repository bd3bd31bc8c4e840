"""The scores of figures: what comes out, and the scoreboard by paper."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

from sim.runs.scenario import Scenario
from traces.models.catalogue import load_model
from trilane.common.units import GIB
from trilane.study.papers.engine_question import EngineQuestion
from trilane.study.papers.figures import PublishedFigure, published
from trilane.study.papers.paper import Case, Paper, PaperQuestion, reasons
from trilane.study.papers.plays import Playable, Plays, key, needed
from trilane.study.papers.quantities import QUANTITIES, Facts
from trilane.study.papers.sources import source_of

NEAR, FAR = 0.15, 0.30  # bands
_TAKE: Mapping[str, Callable[[Iterable[float]], float]] = {"mean": fmean, "min": min, "max": max}


@dataclass(frozen=True)
class FigureScore:
    """A published figure, and what comes out; ``simulated`` is None where it has not been played, and where it was
    ``refused``, with this message: the figure counts as missed."""

    figure: PublishedFigure
    paper: Paper
    simulated: float | None
    refused: str = ""

    @property
    def question(self) -> PaperQuestion | EngineQuestion:
        """The question that the figure answers."""
        return self.paper.asked[self.figure.id]

    @property
    def put_in(self) -> str:
        """The number of the simulator that the figure set, or nothing."""
        return self.paper.put_in_by(self.figure.id)

    @property
    def miss(self) -> str:
        """Why it does not come out, as far as that is known; nothing where it comes out."""
        comes_out = self.played and self.within(NEAR) and not self.wrong_way
        return "" if comes_out else reasons(self.paper.misses, self.figure.id)

    @property
    def counts(self) -> bool:
        """True if it is part of the score."""
        return not self.put_in and self.played

    @property
    def played(self) -> bool:
        """True if it was asked, and answered or refused."""
        return self.simulated is not None or bool(self.refused)

    @property
    def log_ratio(self) -> float:
        """ln(simulated / published); infinite where it was refused."""
        if self.refused:
            return -math.inf
        assert self.simulated is not None
        return self.figure.log_ratio(self.simulated)

    def within(self, band: float) -> bool:
        """True if it differs from the published value by ``band`` of that at most."""
        return 1 - band <= math.exp(self.log_ratio) <= 1 + band

    @property
    def same_direction(self) -> bool | None:
        """True if the same side is better as in print; None where nothing is compared, or neither is better."""
        even, value = QUANTITIES[self.question.ask].even, self.figure.value
        if even is None or value is None or value == even or self.simulated is None:
            return None
        return (self.simulated > even) == (value > even)

    @property
    def wrong_way(self) -> bool:
        """True if another side is better than in print."""
        return self.same_direction is False


def facts_of(score: FigureScore) -> dict[str, Any]:
    """A figure's place, question, values and reasons."""
    figure, question = score.figure, score.question
    off = score.simulated is not None and math.isfinite(score.log_ratio)
    return {
        "id": figure.id, "paper": figure.paper, "where": figure.where, "ask": question.ask, "method": question.method,
        "over": list(question.baselines), "unit": figure.unit, "published": figure.value, "kind": figure.kind,
        "simulated": score.simulated, "refused": score.refused, "log_ratio": score.log_ratio if off else None,
        "put_in": score.put_in, "miss": score.miss, "contradiction": reasons(score.paper.contradictions, figure.id),
    }


# --- scores -----------------------------------------------------------------------------------------------------------


def score_of(figure_id: str, plays: Plays) -> FigureScore:
    """Score one figure."""
    paper = source_of(figure_id)
    question = paper.asked[figure_id]
    cases = case_values(paper, question, plays)
    take = question.take if isinstance(question, PaperQuestion) else "mean"
    value = None if None in cases else _TAKE[take](case for case in cases if case is not None)
    refusals = (one for each in needed([figure_id]) if isinstance(one := plays.get(key(each)), str))
    return FigureScore(published()[figure_id], paper, value, next(refusals, ""))


def case_values(paper: Paper, question: PaperQuestion | EngineQuestion, plays: Plays) -> list[float | None]:
    """The quantity in each case, against the best of the baselines; None where a play or a fact is missing."""
    if isinstance(question, EngineQuestion):
        facts = _facts(plays, question)
        return [facts.get(question.ask)]
    mine = [mean_facts(case, plays) for case in paper.cases(question, question.method)]
    bases = [[mean_facts(case, plays) for case in paper.cases(question, name)] for name in question.baselines]
    of = QUANTITIES[question.ask].of
    try:
        return [
            min(of(one, base) for base in those) if those else of(one, {})
            for one, *those in zip(mine, *bases, strict=True)
        ]
    except KeyError:
        return [None] * len(mine)


def mean_facts(case: Case, plays: Plays) -> Facts:
    """Means over the draws of the facts that all of them have, and the model's sizes; none where a draw has not been
    played."""
    draws = [_facts(plays, draw) for draw in case.draws]
    means = {name: fmean(draw[name] for draw in draws) for name in draws[0] if all(name in draw for draw in draws)}
    return {**means, **_sizes(case.draws[0])} if means else {}


def _facts(plays: Plays, scenario: Playable) -> Facts:
    """None where it has not been played, or was refused."""
    facts = plays.get(key(scenario), {})
    return {} if isinstance(facts, str) else facts


def _sizes(scenario: Scenario) -> Facts:
    """Weights in GiB, which follow from the model alone."""
    if scenario.model is None:
        return {}
    shape = load_model(scenario.model)
    shared = round(shape.moe_layers * shape.shared_params * shape.bits.shared / 8)
    sizes = {"routed": shape.routed_bytes, "shared": shared, "other": shape.non_expert_bytes - shared}
    return {f"{name}_gib": size / GIB for name, size in sizes.items()}


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
        return [score for score in self.scores if not score.played]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"papers": [vars(each) for each in self.summaries()], "figures": [facts_of(s) for s in self.scores],
                "left_out": left_out(self.scores)}


def left_out(scores: Sequence[FigureScore]) -> dict[str, int]:
    """How many figures of these papers are not asked, by reason, the most frequent first."""
    papers = {score.paper.name for score in scores}
    reasons = [figure.left_out for figure in published().values() if figure.paper in papers and figure.left_out]
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
    """True if the simulated values are in the order of the published ones."""
    assert None not in (one.simulated, other.simulated, one.figure.value, other.figure.value)
    return (one.simulated > other.simulated) == (one.figure.value > other.figure.value)  # type: ignore[operator]
