"""The map of an idea: what it gains over the two numbers that decide, and where the machine is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from sim.machine.dials import slot_named
from sim.runs.prepare import Prepared, prepare
from trilane.common.schema import to_dict
from trilane.engines.question import FitError
from trilane.engines.speed import engine_answer
from trilane.study.pays.break_even import GainAt, Range, paying
from trilane.study.pays.dimensions import LINK, Dimension, Values, upload_us
from trilane.study.pays.ideas import PaysError, PaysQuestion, prepared_with_idea
from trilane.study.pays.played_map import Place, PlayedMap, PlayedSide, play_map
from trilane.study.player import Watch
from trilane.study.sweep.axes import vary

_ASSEMBLED = "Assembled: "  # before the parts of a machine in words
_USUAL_LINK = "4x16"  # where none is named: the generation in which links are told
_JUMP = 10.0  # times as many bytes copied per token, from which on two neighbours are not decided alike


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


class Mechanism(NamedTuple):
    """Numbers of the machine's cell that show why the idea pays or not, in pairs without the idea and with it. Times
    are of one token: the whole, which is the GPU's own work and what it waits for other lanes, and a layer's share.
    ``late``: of the prefetches that ran. None: nothing to tell."""

    upload_us: float | None  # of an expert, alone on the link
    token_ms: tuple[float, float]
    layer_us: tuple[float, float]
    work_ms: tuple[float, float]
    cpu_wait_ms: tuple[float, float]
    copy_wait_ms: tuple[float, float]
    host_wait_ms: tuple[float, float]
    link_busy: tuple[float, float]
    hit_rate: tuple[float | None, float | None]
    late: float | None
    decisions: tuple[float, float]  # share of the time


class PlainEngine(NamedTuple):
    """The gain of an engine as it is from a part 25 % better, in closed form: the figure of ``trilane fit``."""

    engine: str
    tokens_per_s: float  # of one sequence, now
    gain: float


def _thousandths(gain: float) -> float:
    return round(gain, 3) + 0.0  # + 0.0: no minus before a zero


@dataclass(frozen=True)
class GainMap:
    """The answer of ``trilane pays``. ``rows``: cells, from the lowest ``y`` on. ``here``: column and row of the
    machine. ``upload_us``: time to copy the mean expert there. ``links``: the PCIe link of every row, if the rows are
    links. ``alternative``: the machine's cell with the question's ``alternative``. ``plain``: the answer for an engine
    as it is, where what is bought has one."""

    question: PaysQuestion
    about: str
    rows: tuple[tuple[Cell, ...], ...]
    here: tuple[int, int]
    upload_us: float
    links: tuple[str, ...] = ()
    alternative: Cell | None = None
    plain: PlainEngine | None = None

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
        return _paying(self.own_row, [cell.x for cell in self.own_row], self.question.idea.worth)

    @property
    def paying_y(self) -> list[Range]:
        """The ranges of ``y`` in which it pays, with the machine's ``x``."""
        return _paying(self.own_column, [cell.y for cell in self.own_column], self.question.idea.worth)

    @property
    def mechanism(self) -> Mechanism:
        """The numbers behind the machine's gain."""
        sides, asked = (self.cell.without, self.cell.using), self.question.fit
        without_ms, using_ms = (1e3 * asked.batch / side.mean_tokens_per_s for side in sides)
        token_ms = without_ms, using_ms
        facts = [side.facts for side in sides]

        def each(fact: str, times: Sequence[float] = (1.0, 1.0)) -> tuple[float, float]:
            first, second = ((one[fact] or 0.0) * time for one, time in zip(facts, times, strict=True))
            return first, second

        late, used = (facts[1][name] or 0.0 for name in ("prefetches_late", "prefetches_used"))
        layers = asked.model_shape.moe_layers
        waits = [each(f"stall_{lane}_share", token_ms) for lane in ("cpu", "h2d", "host")]
        return Mechanism(
            upload_us=self.upload_us if any(each("pcie_bytes_per_token")) else None,
            token_ms=token_ms,
            layer_us=(1e3 * without_ms / layers, 1e3 * using_ms / layers),
            work_ms=(without_ms - sum(wait[0] for wait in waits), using_ms - sum(wait[1] for wait in waits)),
            cpu_wait_ms=waits[0],
            copy_wait_ms=waits[1],
            host_wait_ms=waits[2],
            link_busy=each("h2d_busy_share"),
            hit_rate=(facts[0]["decode_served_hit_rate"], facts[1]["decode_served_hit_rate"]),
            late=late / (late + used) if late + used else None,
            decisions=each("plan_overhead_share"),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        cells = [cell.to_dict() for row in self.rows for cell in row]
        alternative = None if self.alternative is None else self.alternative.to_dict()
        idea = self.question.idea
        return {
            "question": to_dict(self.question), "about": self.about, "x": idea.x.label, "y": idea.y.label,
            "worth": idea.worth, "plain_engine": None if self.plain is None else self.plain._asdict(),
            "engines": {"without": self.cell.without.engine, "using": self.cell.using.engine},
            "why": self.mechanism._asdict(), "links": self.links, "cells": cells,
            "here": {"x": self.cell.x, "y": self.cell.y}, "alternative": alternative, "paying": self.paying,
            "paying_at": {"x": [one._asdict() for one in self.paying_x], "y": [one._asdict() for one in self.paying_y]},
        }


def gain_map(question: PaysQuestion, jobs: int = 1, watch: Watch | None = None) -> GainMap:
    """Simulate the map. Raises what ``prepared_with_idea`` and ``play_map`` raise, and PaysError if one of the two
    sides cannot run on the machine itself."""
    prepared, idea = prepared_with_idea(question), question.idea
    own = idea.own(prepared, question.x, question.y)
    xs, ys = idea.values(prepared, own)
    played = play_map(question, prepared, xs, ys, own, jobs, watch)
    shown = [_shown(prepared, dimension, values) for dimension, values in ((idea.x, xs), (idea.y, ys))]
    rows = tuple(
        tuple(_cell(question, played, (x, y), (at_x, at_y)) for x, at_x in zip(xs, shown[0], strict=True))
        for y, at_y in zip(ys, shown[1], strict=True)
    )
    here = _on_link(prepared, own[1]) if idea.varies_link else prepared
    found = GainMap(
        question, _about(prepared, question), rows, (xs.index(own[0]), ys.index(own[1])), upload_us(here),
        _links(prepared, question, ys), plain=_plain(prepared, question),
    )
    if found.cell.gain is None:
        raise PaysError(f"pays: {found.cell.without.reason or found.cell.using.reason}")
    return replace(found, alternative=_alternative(found, played, own))


def _on_link(prepared: Prepared, gb_per_s: float) -> Prepared:
    return prepare(vary(prepared.scenario, LINK.axis, gb_per_s), prepared.trace)


def _links(prepared: Prepared, question: PaysQuestion, ys: Values) -> tuple[str, ...]:
    """The PCIe links of the rows, in the generation of the slot that was named."""
    if not question.idea.varies_link:
        return ()
    generation = int((question.fit.pcie or _USUAL_LINK)[0])
    rates = [_on_link(prepared, y).hardware.link.theory_bytes_per_s for y in ys]
    return tuple(slot_named(rate, generation) for rate in rates)


def _plain(prepared: Prepared, question: PaysQuestion) -> PlainEngine | None:
    """The closed form's answer to what is bought, for the machine as it is named."""
    if not question.idea.part or prepared.hardware.measured or question.x is not None:
        return None
    try:
        answer = engine_answer(question.fit, question.fit.model_shape, question.fit.load_machine())
    except FitError:
        return None
    gains = {gain.part: gain.tpot for gain in answer.gains}
    return PlainEngine(answer.engine, 1e3 / answer.tpot_ms, gains.get(question.idea.part, 0.0))


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
    machine = prepared.hardware.about.removeprefix(_ASSEMBLED).removesuffix(".")
    if machine == prepared.hardware.about:
        machine = prepared.hardware.name
    return (
        f"{prepared.shape.name} on {machine}{batch}: answers of {asked.generated:,} tokens after "
        f"{asked.prompt_tokens:,}, {routing} routing, {draws}"
    )

def _paying(cells: Sequence[Cell], values: Sequence[float], worth: float) -> list[Range]:
    jumps = [False, *(_jumps(before.without, after.without) or _jumps(before.using, after.using)
                      for before, after in pairwise(cells))]
    gains = [None if cell.gain is None else cell.gain - worth for cell in cells]
    return paying([GainAt(*step) for step in zip(values, gains, jumps, strict=True)])


def _jumps(before: PlayedSide, after: PlayedSide) -> bool:
    """True if one of two neighbours copies ten times what the other does, or more.

    A policy that decides alike at both copies in proportion to its misses, which change less between neighbours. Where
    it begins to copy, its speed jumps at a value in between that is not known, and a straight line says nothing.
    """
    less, more = sorted(side.facts.get("pcie_bytes_per_token") or 0.0 for side in (before, after))
    return more > _JUMP * less
