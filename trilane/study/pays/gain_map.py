"""The map of an idea: what it gains over the two numbers that decide, and where the machine is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from sim.runs.prepare import Prepared, prepare
from trilane.common.schema import to_dict
from trilane.study.pays.dimensions import Dimension, Values
from trilane.study.pays.ideas import PaysError
from trilane.study.pays.played_map import Place, PlayedMap, PlayedSide, play_map
from trilane.study.pays.question import PaysQuestion, prepared_with_idea
from trilane.study.player import Watch
from trilane.study.sweep.axes import vary


@dataclass(frozen=True)
class Cell:
    """A place of a map: ``x`` and ``y`` as they are shown, and both sides there."""

    x: float
    y: float
    without: PlayedSide
    using: PlayedSide

    @property
    def gains(self) -> tuple[float, ...]:
        """Speed with the idea over that without, minus 1, of each draw, in thousandths: less is no gain. None if one of
        the two cannot run."""
        pairs = zip(self.using.tokens_per_s, self.without.tokens_per_s, strict=False)
        return tuple(_thousandths(using / without - 1) for using, without in pairs)

    @property
    def gain(self) -> float | None:
        """The mean over the draws."""
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
        """The machine's."""
        return self.rows[self.here[1]][self.here[0]]

    @property
    def own_row(self) -> tuple[Cell, ...]:
        """The cells with the machine's ``y``."""
        return self.rows[self.here[1]]

    @property
    def own_column(self) -> tuple[Cell, ...]:
        """The cells with the machine's ``x``."""
        return tuple(row[self.here[0]] for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        cells = [cell.to_dict() for row in self.rows for cell in row]
        alternative = None if self.alternative is None else self.alternative.to_dict()
        idea = self.question.idea
        return {
            "question": to_dict(self.question), "about": self.about, "x": idea.x.label, "y": idea.y.label,
            "worth": idea.worth, "cells": cells, "here": {"x": self.cell.x, "y": self.cell.y},
            "alternative": alternative,
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
    """What was played."""
    asked = question.fit
    batch = "" if asked.batch == 1 else f", batch {asked.batch}"
    draws = "1 draw" if question.draws == 1 else f"{question.draws} draws (of other texts)"
    routing = "synthetic" if prepared.trace.provenance.get("synthetic") else "recorded"
    return (
        f"{prepared.shape.name} on {prepared.hardware.name}{batch}: answers of {asked.generated:,} tokens after "
        f"{asked.prompt_tokens:,}, {routing} routing, {draws}"
    )
