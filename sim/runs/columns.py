"""Spans as plain arrays: the form in which metrics, stalls and hits read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.runs.spans import NUMBERS, Row, read_rows
from sim.runs.vocabulary import FURTHER_LANES, GPU_LANES, LANES, SPAN_KINDS, lanes_with

if TYPE_CHECKING:
    import pandas as pd

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_LANE = {name: code for code, name in enumerate((*LANES, *FURTHER_LANES))}
_KIND = {name: code for code, name in enumerate(SPAN_KINDS)}
_PHASE = {"prefill": 0, "decode": 1}
_CODES = {"lane": _LANE, "kind": _KIND, "phase": _PHASE}


class Columns(NamedTuple):
    """The columns of a spans frame (``spans_frame``), in its order; times in ns.

    ``home`` is the layer whose weights or results a span is about: its target layer, or its layer where it has none.
    """

    lane: NDArray[np.int8]  # place in LANES and FURTHER_LANES
    kind: NDArray[np.int8]  # place in SPAN_KINDS
    decode: Bools
    ready: Ints
    start: Ints
    end: Ints
    step: Ints
    layer: Ints
    home: Ints
    expert: Ints
    tokens: Ints
    size_bytes: Ints

    def on(self, lane: str) -> Bools:
        """Which spans are on ``lane``."""
        return np.asarray(self.lane == _LANE[lane])

    @property
    def on_gpu(self) -> Bools:
        """Which spans are on the lane of a GPU."""
        return np.isin(self.lane, [_LANE[lane] for lane in GPU_LANES])

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes of the run."""
        return lanes_with([lane for lane in FURTHER_LANES if self.on(lane).any()])

    def of(self, *kinds: str) -> Bools:
        """Which spans are of one of ``kinds``."""
        mask = np.zeros(len(self.kind), dtype=np.bool_)
        for kind in kinds:
            mask |= self.kind == _KIND[kind]
        return mask

    def within(self, begin: int, end: int) -> Ints:
        """How much of each span lies between two times, in ns."""
        return np.clip(self.end, begin, end) - np.clip(self.start, begin, end)

    def where(self, mask: Bools | Ints) -> Columns:
        """The spans that a mask selects, or those of the given rows, in that order."""
        rows = np.flatnonzero(mask) if mask.dtype == np.bool_ else mask
        return Columns._make(column.take(rows) for column in self)


def columns_of(spans: pd.DataFrame) -> Columns:
    """Read a spans frame. Raises ValueError on a lane or kind that the vocabulary does not have."""
    texts = {name: spans[name].astype("category").array for name in _CODES}
    codes = {name: _codes_of(name, column.categories.tolist())[column.codes] for name, column in texts.items()}
    return _columns(codes, {name: spans[name].to_numpy(np.int64) for name in NUMBERS})


def columns_of_rows(rows: list[Row]) -> Columns:
    """``columns_of(spans_frame(rows))``, without the frame, and without pandas, whose import takes half a second."""
    read = read_rows(rows)
    codes = {name: _codes_of(name, read.texts[name])[read.places] for name in _CODES}
    return _columns(codes, read.numbers)


def _codes_of(column: str, texts: list[str]) -> NDArray[np.int8]:
    """The code of each of these texts of a column."""
    names = _CODES[column]
    unknown = [text for text in texts if text not in names]
    if unknown:
        raise ValueError(f"spans: unknown {column} {unknown[0]!r}; known: {', '.join(names)}")
    return np.array([names[text] for text in texts], dtype=np.int8)


def _columns(codes: Mapping[str, NDArray[np.int8]], numbers: Mapping[str, Ints]) -> Columns:
    layer, target = numbers["layer"], numbers["target_layer"]
    return Columns(
        lane=codes["lane"], kind=codes["kind"], decode=codes["phase"] == _PHASE["decode"],
        ready=numbers["ready_ns"], start=numbers["start_ns"], end=numbers["end_ns"],
        step=numbers["step"], layer=layer, home=np.where(target >= 0, target, layer), expert=numbers["expert"],
        tokens=numbers["tokens"], size_bytes=numbers["bytes"],
    )


class Cells(NamedTuple):
    """Numbers for (step, layer) and (layer, expert), dense enough to index arrays and to pack with a time."""

    layers: int
    experts: int
    horizon: int  # later than every time in the spans

    def layer(self, step: Ints, layer: Ints) -> Ints:
        """One number for each layer of each step, in the order of time."""
        return step * self.layers + layer

    def expert(self, layer: Ints, expert: Ints) -> Ints:
        """One number for each expert of the model."""
        return layer * self.experts + expert

    def use(self, step: Ints, layer: Ints, expert: Ints) -> Ints:
        """One number for each expert of each layer of each step."""
        return self.layer(step, layer) * self.experts + expert

    def at(self, expert: Ints, time: Ints) -> Ints:
        """An expert (as numbered above) and a time in one sortable number."""
        return expert * self.horizon + time


def cells_of(c: Columns) -> Cells:
    """The numbering that fits these spans."""
    if not len(c.end):
        return Cells(1, 1, 2)
    return Cells(max(1, int(c.home.max()) + 1), max(1, int(c.expert.max()) + 1), int(c.end.max()) + 2)


def first_at_or_after(sorted_keys: Ints, keys: Ints) -> Ints:
    """Place of the first sorted key >= each key; the length where there is none."""
    return np.searchsorted(sorted_keys, keys, side="left")


def among(sorted_keys: Ints, keys: Ints) -> Bools:
    """Mask of the keys (none is -1) that are among the sorted ones."""
    return np.asarray(np.append(sorted_keys, -1)[first_at_or_after(sorted_keys, keys)] == keys)


def routed_at(c: Columns, cells: Cells) -> Ints:
    """When each layer of each step was routed (its plan began), by ``Cells.layer``; -1 where it was not."""
    plans = c.where(c.of("plan"))
    size = (int(c.step.max()) + 1) * cells.layers if len(c.step) else 0
    times = np.full(max(size, 0), -1, dtype=np.int64)
    times[cells.layer(plans.step, plans.layer)] = plans.start
    return times
