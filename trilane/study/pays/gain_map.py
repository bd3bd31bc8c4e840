"""The map of an idea: what it gains over the two numbers that decide, and where the machine is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, groupby, pairwise, product
from statistics import fmean
from typing import Any, NamedTuple

from sim.runs.columns import columns_of_rows
from sim.runs.metrics import Metrics, metrics_of
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from sim.simulate import spans_of
from trilane.common.errors import TrilaneError
from trilane.common.gc_paused import gc_paused
from trilane.common.schema import to_dict
from trilane.study.pays.ideas import Candidate, Dimension, PaysError, PaysQuestion, Values, prepared_with_idea
from trilane.study.player import LastPrepared, Watch, check_workers, in_order, play
from trilane.study.sweep.axes import policy_in, vary
from trilane.study.sweep.grid import Grid, Point, canonical, points

FACTS = (
    "decode_served_hit_rate", "pcie_bytes_per_token", "prefetch_accuracy", "stall_cpu_share", "stall_h2d_share",
)
Place = tuple[float, float]  # values of the two axes


class PlayedSide(NamedTuple):
    """A policy at a place, such as the fastest of some: tokens a second of all sequences in each draw, and means of
    FACTS; or the reason why it cannot run."""

    policy: str
    tokens_per_s: tuple[float, ...]
    facts: Mapping[str, float | None]
    reason: str = ""

    @property
    def mean_tokens_per_s(self) -> float:
        """The mean over the draws; 0 where nothing can run."""
        return fmean(self.tokens_per_s or (0.0,))


class Paying(StrEnum):
    """The answer on the machine: every draw gains more than the idea is worth, no draw does, or some do."""

    YES = "pays"
    NO = "does not pay"
    PERHAPS = "may pay"


@dataclass(frozen=True)
class Cell:
    """A place of a map: ``x`` and ``y`` as they are shown, and both sides there."""

    x: float
    y: float
    without: PlayedSide
    using: PlayedSide

    @property
    def gains(self) -> tuple[float, ...]:
        """Speed with the idea over that without, minus 1, in every draw, rounded to thousandths: less is no gain. Empty
        if one of the two cannot run."""
        pairs = zip(self.using.tokens_per_s, self.without.tokens_per_s, strict=False)
        return tuple(_thousandths(using / without - 1) for using, without in pairs)

    @property
    def gain(self) -> float | None:
        """The mean gain over the draws; None if one of the two sides cannot run."""
        return _thousandths(fmean(self.gains)) if self.gains else None

    def to_dict(self) -> dict[str, Any]:
        return {**to_dict(self), "gains": self.gains}


def _thousandths(gain: float) -> float:
    return round(gain, 3) + 0.0  # + 0.0: no minus before a zero


@dataclass(frozen=True)
class GainMap:
    """The answer of ``trilane pays``. ``rows``: cells, from the lowest ``y`` on. ``here``: column and row of the
    machine. ``alternative``: its cell with the question's ``alternative``."""

    question: PaysQuestion
    about: str
    rows: tuple[tuple[Cell, ...], ...]
    here: tuple[int, int]
    alternative: Cell | None = None

    @property
    def cell(self) -> Cell:
        """The machine's cell."""
        return self.rows[self.here[1]][self.here[0]]

    @property
    def own_row(self) -> tuple[Cell, ...]:
        """The cells with the machine's ``y``."""
        return self.rows[self.here[1]]

    @property
    def own_column(self) -> tuple[Cell, ...]:
        """The cells with the machine's ``x``."""
        return tuple(row[self.here[0]] for row in self.rows)

    @property
    def paying(self) -> Paying:
        """The answer on the machine."""
        worth = self.question.idea.worth
        if min(self.cell.gains) > worth:
            return Paying.YES
        return Paying.NO if max(self.cell.gains) <= worth else Paying.PERHAPS

    @property
    def paying_x(self) -> list[Range]:
        """The ranges of ``x`` in which the idea pays, with the machine's ``y``."""
        return paying([(cell.x, cell.gain) for cell in self.own_row], self.question.idea.worth)

    @property
    def paying_y(self) -> list[Range]:
        """The ranges of ``y`` in which it pays, with the machine's ``x``."""
        return paying([(cell.y, cell.gain) for cell in self.own_column], self.question.idea.worth)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        cells = [cell.to_dict() for row in self.rows for cell in row]
        alternative = None if self.alternative is None else self.alternative.to_dict()
        idea = self.question.idea
        return {
            "question": to_dict(self.question), "about": self.about, "x": idea.x.label, "y": idea.y.label,
            "worth": idea.worth, "cells": cells, "here": {"x": self.cell.x, "y": self.cell.y},
            "alternative": alternative, "paying": self.paying,
            "paying_at": {"x": [one._asdict() for one in self.paying_x], "y": [one._asdict() for one in self.paying_y]},
        }


def gain_map(question: PaysQuestion, jobs: int = 1, watch: Watch | None = None) -> GainMap:
    """Simulate the map. Raises what ``prepared_with_idea`` and ``play_map`` raise, and PaysError if one of the two
    sides cannot run on the machine itself."""
    prepared, idea = prepared_with_idea(question), question.idea
    own = idea.own(prepared, question.x, question.y)
    xs, ys = idea.x.values(prepared, own[0]), idea.y.values(prepared, own[1])
    played = play_map(question, prepared, xs, ys, own, jobs, watch)
    shown = [_shown(prepared, dimension, values) for dimension, values in ((idea.x, xs), (idea.y, ys))]
    rows = tuple(
        tuple(_cell(question, played, (x, y), (at_x, at_y)) for x, at_x in zip(xs, shown[0], strict=True))
        for y, at_y in zip(ys, shown[1], strict=True)
    )
    found = GainMap(question, _about(prepared, question), rows, (xs.index(own[0]), ys.index(own[1])))
    if found.cell.gain is None:
        raise PaysError(f"pays: {found.cell.without.reason or found.cell.using.reason}")
    return replace(found, alternative=_alternative(found, played, own))


def _alternative(found: GainMap, played: PlayedMap, own: Place) -> Cell | None:
    question = found.question
    if question.alternative is None:
        return None
    return replace(found.cell, using=played.fastest([question.alternative], *question.idea.place_using(*own)))


def _shown(prepared: Prepared, dimension: Dimension, values: Values) -> Values:
    if dimension.shown is None:
        return values
    scenarios = [vary(prepared.scenario, dimension.axis, value) for value in values]
    return tuple(dimension.shown(prepare(scenario, prepared.trace)) for scenario in scenarios)


def _cell(question: PaysQuestion, played: PlayedMap, at: tuple[float, float], shown: tuple[float, float]) -> Cell:
    idea = question.idea
    without = played.fastest(question.without, *idea.place_without(*at))
    return Cell(*shown, without, played.fastest(question.using, *idea.place_using(*at)))


def _about(prepared: Prepared, question: PaysQuestion) -> str:
    """The model, machine, lengths, routing and draws, in words."""
    asked = question.fit
    batch = "" if asked.batch == 1 else f", batch {asked.batch}"
    draws = "1 draw" if question.draws == 1 else f"{question.draws} draws (of other texts)"
    routing = "synthetic" if prepared.trace.provenance.get("synthetic") else "recorded"
    return (
        f"{prepared.shape.name} on {prepared.hardware.name}{batch}: answers of {asked.generated:,} tokens after "
        f"{asked.prompt_tokens:,}, {routing} routing, {draws}"
    )


# --- what is played ---------------------------------------------------------------------------------------------------


class PlayedMap:
    """Sides that were played, by candidate and place."""

    def __init__(self, question: PaysQuestion, tasks: Sequence[Point], played: Sequence[PlayedSide]) -> None:
        self._played: dict[tuple[str, float, float], list[PlayedSide]] = {}
        x, y = question.idea.x.axis, question.idea.y.axis
        for point, one in zip(tasks, played, strict=True):
            candidate = Candidate(point.axes["policy"], point.axes["engine"])
            self._played.setdefault((canonical(candidate), point.axes[x], point.axes[y]), []).append(one)

    def fastest(self, candidates: Sequence[Candidate], x: float, y: float) -> PlayedSide:
        """The fastest of several at a place, by the mean over the draws."""
        sides = [_side(self._played[canonical(one), x, y]) for one in candidates]
        return max(sides, key=lambda side: side.mean_tokens_per_s)


def play_map(
    question: PaysQuestion, prepared: Prepared, xs: Values, ys: Values, own: Place, jobs: int = 1,
    watch: Watch | None = None,
) -> PlayedMap:
    """Simulate all places without the idea and with it, and the machine's, ``own``, with the alternative. Raises
    ChoiceError for a policy that other processes lack."""
    check_workers([candidate.policy_name for candidate in (*question.without, *question.using)], jobs)
    tasks = points(_grid(question, prepared, list(product(xs, ys)), own))
    return PlayedMap(question, tasks, list(in_order(play(_play, tasks, lambda point: point.setting, jobs, watch))))


def _grid(question: PaysQuestion, prepared: Prepared, places: Sequence[Place], own: Place) -> Grid:
    """Both sides at every place; what is the same at several of them is one point."""
    idea = question.idea
    sides = [
        *((candidate, [idea.place_without(*at) for at in places]) for candidate in question.without),
        *((candidate, [idea.place_using(*at) for at in places]) for candidate in question.using),
    ]
    if question.alternative is not None:
        sides.append((question.alternative, [idea.place_using(*own)]))
    names = (idea.x.axis, idea.y.axis)
    axes = tuple(
        {"policy": (candidate.policy,), "engine": (candidate.engine,)}
        | dict(zip(names, zip(*played, strict=True), strict=True))
        for candidate, played in sides
    )
    return Grid(_scenario(prepared, idea.x.axis), axes, question.draws, clairvoyant=False)


def _scenario(prepared: Prepared, axis: str) -> Scenario:
    """The question's; with room for any share of the experts where that is varied."""
    if axis != "cached_share":
        return prepared.scenario
    memory_bytes = prepared.hardware.gpu.memory_bytes + prepared.shape.routed_bytes
    overrides = {**prepared.scenario.hardware_overrides, "gpu.memory_bytes": memory_bytes}
    return prepared.scenario.with_(hardware_overrides=overrides)


def _play(last: LastPrepared, point: Point) -> PlayedSide:
    """One draw of one policy, without what a map has no use for: bounds, and a table's row."""
    policy, _ = policy_in(point.axes["policy"])
    if point.scenario is None:
        return PlayedSide(policy, (), {}, point.problem.partition(": ")[2])
    try:
        with gc_paused():
            numbers = _metrics(last.of(point.scenario)).to_dict()
    except TrilaneError as error:
        return PlayedSide(policy, (), {}, str(error))
    return PlayedSide(policy, (numbers["throughput_tokens_per_s"] or 0.0,), {name: numbers[name] for name in FACTS})


def _metrics(prepared: Prepared) -> Metrics:
    spans = columns_of_rows(spans_of(prepared))
    return metrics_of(spans, prepared.scenario.batch, prepared.answer_tokens)


def _side(draws: Sequence[PlayedSide]) -> PlayedSide:
    """All draws of one policy at a place, or the first that cannot run."""
    facts = {name: _mean([one.facts.get(name) for one in draws]) for name in FACTS}
    together = PlayedSide(draws[0].policy, tuple(chain(*(one.tokens_per_s for one in draws))), facts)
    return next((one for one in draws if one.reason), together)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# --- where an idea begins to pay --------------------------------------------------------------------------------------


class Range(NamedTuple):
    """Values between which an idea pays; None: up to the end of those that have a gain."""

    low: float | None
    high: float | None


def paying(gains: Sequence[tuple[float, float | None]], worth: float) -> list[Range]:
    """The ranges in which gains are above ``worth``, of ascending values with their gains; straight lines in between.

    No line crosses a value without a gain between two that have one: a range ends before it.
    """
    groups = groupby(gains, key=lambda pair: pair[1] is not None)
    runs = [[(value, gain - worth) for value, gain in group if gain is not None] for known, group in groups if known]
    ranges: list[Range] = []
    for place, run in enumerate(runs):
        low = run[0][0] if place else None
        ranges += _within(run, low, run[-1][0] if place + 1 < len(runs) else None)
    return ranges


def _within(run: Sequence[tuple[float, float]], low: float | None, high: float | None) -> Iterator[Range]:
    """The ranges of neighbours, that begin at ``low`` and end at ``high``; gains are above what is worth it."""
    for (left, before), (right, after) in pairwise(run):
        if (before > 0) != (after > 0):
            crossing = left + (right - left) * before / (before - after)
            if before > 0:
                yield Range(low, crossing)
            low = crossing
    if run[-1][1] > 0:
        yield Range(low, high)
