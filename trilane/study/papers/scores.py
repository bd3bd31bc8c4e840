"""One figure's score: the question that it asks, the plays that answer it, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sim.runs.scenario import Scenario
from traces.models.catalogue import load_model
from trilane.common.names import unknown
from trilane.common.units import GIB
from trilane.study.papers.paper import Case, Paper, PaperQuestion, read_papers, reasons
from trilane.study.papers.plays import Plays, key
from trilane.study.papers.published import PapersError, PublishedFigure, read_figures
from trilane.study.papers.quantities import QUANTITIES, Facts

NEAR, FAR = 0.15, 0.30  # bands
_TAKE: Mapping[str, Callable[[Iterable[float]], float]] = {"mean": fmean, "min": min, "max": max}


@dataclass(frozen=True)
class FigureScore:
    """A published figure, and what comes out; ``simulated`` is None where it has not been played."""

    figure: PublishedFigure
    paper: Paper
    simulated: float | None

    @property
    def question(self) -> PaperQuestion:
        """What it asks."""
        return self.paper.questions[self.figure.id]

    @property
    def put_in(self) -> str:
        """The number of the simulator that the figure set, or nothing."""
        return self.paper.put_in_by(self.figure.id)

    @property
    def miss(self) -> str:
        """Why it does not come out, as far as that is known; nothing where it comes out."""
        comes_out = self.simulated is not None and self.within(NEAR) and not self.wrong_way
        return "" if comes_out else reasons(self.paper.misses, self.figure.id)

    @property
    def counts(self) -> bool:
        """Whether it is part of the score."""
        return not self.put_in and self.simulated is not None

    @property
    def log_ratio(self) -> float:
        """ln(simulated / published)."""
        assert self.simulated is not None
        return self.figure.log_ratio(self.simulated)

    def within(self, band: float) -> bool:
        """Whether it differs from the published value by ``band`` of that at most."""
        return 1 - band <= math.exp(self.log_ratio) <= 1 + band

    @property
    def same_direction(self) -> bool | None:
        """Whether the same side is better; None where nothing is compared, or neither is better in print."""
        even, value = QUANTITIES[self.question.ask].even, self.figure.value
        if even is None or value is None or value == even or self.simulated is None:
            return None
        return (self.simulated > even) == (value > even)

    @property
    def wrong_way(self) -> bool:
        """Whether another side is better than in print."""
        return self.same_direction is False


def facts_of(score: FigureScore) -> dict[str, Any]:
    """A figure's place, question, values and reasons."""
    figure, question = score.figure, score.question
    off = score.simulated is not None and math.isfinite(score.log_ratio)
    return {
        "id": figure.id, "paper": figure.paper, "where": figure.where, "ask": question.ask, "method": question.method,
        "over": list(question.baselines), "unit": figure.unit, "published": figure.value, "kind": figure.kind,
        "simulated": score.simulated, "log_ratio": score.log_ratio if off else None, "put_in": score.put_in,
        "miss": score.miss, "contradiction": reasons(score.paper.contradictions, figure.id),
    }


# --- which figures ----------------------------------------------------------------------------------------------------


def chosen_figures(paper: str | None = None, figure_id: str | None = None, headlines: bool = False) -> list[str]:
    """Ids of the figures that are asked: of one paper, the headlines alone, or one. Raises PapersError."""
    papers = read_papers()
    if paper is not None:
        papers = {name: papers[name] for name in [_one(paper, papers, "paper")]}
    ids = [each for one in papers.values() for each in (one.headlines if headlines else one.questions)]
    return ids if figure_id is None else [_one(figure_id, ids, "figure")]


def _one(name: str, names: Iterable[str], what: str) -> str:
    known = {each.lower(): each for each in names}
    if name.lower() in known:
        return known[name.lower()]
    reason = read_figures()[name].left_out if name in read_figures() else ""
    if reason:
        raise PapersError(f"{name}: this figure is not asked: {reason}")
    if what == "paper":
        raise PapersError(unknown(what, name, known.values()))
    listed = unknown(what, name, known.values(), "trilane papers --paper NAME")
    raise PapersError(f"{listed}; NAME is one of {', '.join(read_papers())}")


def needed(figure_ids: Iterable[str]) -> list[Scenario]:
    """The scenarios that figures need, with repetitions. Raises ScenarioError."""
    return [
        draw
        for figure_id in figure_ids
        for paper, question in [asked(figure_id)]
        for method in (question.method, *question.baselines)
        for case in paper.cases(question, method)
        for draw in case.draws
    ]


def asked(figure_id: str) -> tuple[Paper, PaperQuestion]:
    """A figure's paper and question."""
    paper = read_papers()[read_figures()[figure_id].paper]
    return paper, paper.questions[figure_id]


# --- scores -----------------------------------------------------------------------------------------------------------


def score_of(figure_id: str, plays: Plays) -> FigureScore:
    """Score one figure."""
    paper, question = asked(figure_id)
    cases = case_values(paper, question, plays)
    value = None if None in cases else _TAKE[question.take](case for case in cases if case is not None)
    return FigureScore(read_figures()[figure_id], paper, value)


def case_values(paper: Paper, question: PaperQuestion, plays: Plays) -> list[float | None]:
    """The quantity in each case, against the best of the baselines; None where a play or a fact is missing."""
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
    draws = [plays.get(key(draw), {}) for draw in case.draws]
    means = {name: fmean(draw[name] for draw in draws) for name in draws[0] if all(name in draw for draw in draws)}
    return {**means, **_sizes(case.draws[0])} if means else {}


def _sizes(scenario: Scenario) -> Facts:
    """Weights in GiB, which follow from the model alone."""
    if scenario.model is None:
        return {}
    shape = load_model(scenario.model)
    shared = round(shape.moe_layers * shape.shared_params * shape.dense_bits / 8)
    sizes = {"routed": shape.routed_bytes, "shared": shared, "other": shape.non_expert_bytes - shared}
    return {f"{name}_gib": size / GIB for name, size in sizes.items()}
