"""The score of a figure in each way in which it is asked: what comes out, and from which figures it follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sim.runs.scenario import Scenario
from traces.models.catalogue import load_model
from trilane.common.units import GIB
from trilane.study.papers.calibrations import Calibrations
from trilane.study.papers.engine_question import EngineQuestion
from trilane.study.papers.figures import PublishedFigure, published
from trilane.study.papers.follows import follows
from trilane.study.papers.paper import AskingWay, Case, Paper, PaperQuestion, reasons
from trilane.study.papers.plays import Playable, Plays, key, plays_of
from trilane.study.papers.quantities import QUANTITIES, TIMED, Facts, subject_of
from trilane.study.papers.sources import source_of
from trilane.study.papers.ways import STUDIED, Asked, cases, range_of_kinds

NEAR, FAR = 0.15, 0.30  # bands
_TAKE: Mapping[str, Callable[[Iterable[float]], float]] = {"mean": fmean, "min": min, "max": max}


@dataclass(frozen=True)
class FigureScore:
    """A published figure, and what comes out in one way of asking.

    ``simulated`` is None where it has not been played, and where it was ``refused``, with this message: the figure
    counts as missed. ``low`` and ``high``: what programs of its kinds take at the ends; None: no range is known.
    """

    figure: PublishedFigure
    paper: Paper
    simulated: float | None
    refused: str = ""
    way: AskingWay = AskingWay.STUDIED
    low: float | None = None
    high: float | None = None

    @property
    def question(self) -> PaperQuestion | EngineQuestion:
        """The question that the figure answers."""
        return self.paper.asked[self.figure.id]

    @property
    def timed(self) -> bool:
        """True for times, speeds, and what compares them."""
        return subject_of(self.question.ask) in TIMED

    @property
    def put_in(self) -> str:
        """The number of the simulator that the figure set, or nothing."""
        return self.paper.put_in_by(self.figure.id, self.way)

    @property
    def follows(self) -> str:
        """The figure that was put in and from which this one follows (``trilane.study.papers.follows``), or nothing."""
        return "" if self.put_in else follows(self.paper, self.figure.id, self.way)

    @property
    def miss(self) -> str:
        """Why it does not come out, as far as that is known; nothing where it comes out."""
        comes_out = self.played and self.within(NEAR) and not self.wrong_way
        return "" if comes_out or self.way is not AskingWay.STUDIED else reasons(self.paper.misses, self.figure.id)

    @property
    def counts(self) -> bool:
        """True if it is part of the score."""
        return self.played and not self.put_in and not self.follows

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
    def in_range(self) -> bool | None:
        """True if the published value is what some program of its kinds could take; None without a range."""
        if self.low is None or self.high is None or self.figure.value is None:
            return None
        met = self.figure.meets_bound(self.low) or self.figure.meets_bound(self.high)
        return met or self.low <= self.figure.value <= self.high

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
    """A figure's place, question and published value."""
    figure, question = score.figure, score.question
    return {
        "id": figure.id, "paper": figure.paper, "where": figure.where, "ask": question.ask, "method": question.method,
        "over": list(question.baselines), "unit": figure.unit, "published": figure.value, "kind": figure.kind,
        "contradiction": reasons(score.paper.contradictions, figure.id),
    }


def result_of(score: FigureScore) -> dict[str, Any]:
    """The result of asking in one way, ready for JSON."""
    off = score.simulated is not None and math.isfinite(score.log_ratio)
    return {
        "simulated": score.simulated, "refused": score.refused, "log_ratio": score.log_ratio if off else None,
        "low": score.low, "high": score.high, "in_range": score.in_range, "put_in": score.put_in,
        "follows": score.follows, "miss": score.miss,
    }


# --- scores -----------------------------------------------------------------------------------------------------------


def score_of(
    figure_id: str, plays: Plays, way: AskingWay = AskingWay.STUDIED, calibrations: Calibrations | None = None
) -> FigureScore:
    """Score one figure in one way. ``calibrations``: None: those that come with the program."""
    paper, asked = source_of(figure_id), Asked(way, calibrations=calibrations)
    question = paper.asked[figure_id]
    refusals = (one for each in plays_of(paper, question, asked) if isinstance(one := plays.get(key(each)), str))
    value = value_of(paper, question, plays, asked)
    low, high = _range(paper, question, plays, value) if way is AskingWay.NOTHING else (None, None)
    return FigureScore(published()[figure_id], paper, value, next(refusals, ""), way, low, high)


def value_of(
    paper: Paper, question: PaperQuestion | EngineQuestion, plays: Plays, asked: Asked = STUDIED
) -> float | None:
    """The quantity over all cases; None where a play or a fact is missing."""
    if isinstance(question, EngineQuestion):
        return _facts(plays, question).get(question.ask)
    values = case_values(paper, question, plays, asked)
    return None if None in values else _TAKE[question.take](value for value in values if value is not None)


def _range(
    paper: Paper, question: PaperQuestion | EngineQuestion, plays: Plays, value: float | None
) -> tuple[float | None, float | None]:
    """The least and the most that programs of the kinds take; of an engine, the band of such speeds."""
    if value is None:
        return None, None
    if isinstance(question, EngineQuestion):
        band = _facts(plays, question).get(question.band)
        return (None, None) if band is None else (value / (1 + band), value * (1 + band))
    ends = [value_of(paper, question, plays, asked) for asked in range_of_kinds(paper, question)]
    known = [one for one in ends if one is not None]
    return (min(value, *known), max(value, *known)) if known and known == ends else (None, None)


def case_values(
    paper: Paper, question: PaperQuestion, plays: Plays, asked: Asked = STUDIED
) -> list[float | None]:
    """The quantity in each case, against the best of the baselines; None where a play or a fact is missing."""
    mine = [mean_facts(case, plays) for case in cases(paper, question, question.method, asked)]
    bases = [[mean_facts(case, plays) for case in cases(paper, question, name, asked)] for name in question.baselines]
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
