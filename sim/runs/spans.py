"""Spans: the work of each lane, the one record from which every metric, picture and check is made.

What each span waits for, and how long it lasts: docs/design.md, Time model. What its columns say:

- ``ready_ns``: a span starts when it is ready and its lane free. The gpu lane runs in order, so that `combine` also
  waits for every GPU expert, and `attention` for the layer before; their ready_ns does not repeat it.
- ``layer`` is the layer at work, ``target_layer`` that it is for; -1: none. On h2d, ``layer`` is the expert's own layer
  (`withdraw` names it as target_layer). Layer -1 is what a step does before its first layer, `launch` and `draft` (on
  gpu: all of them, one after the other), and after its last one: `launch`, the LM head (an `attention`), a `routing`
  copy of the chosen tokens, and a `wait`, whose end is the step's end.
- ``expert``: a number no less than the number of experts in a layer is that of a narrow copy (``NarrowCopies``).
- ``tokens`` of a step's last `wait` are the drafts that it accepts; its last `routing` has none if it computes tokens
  again, and chooses none.

Zero-length spans on h2d say what became of memory: `place` (resident before the first token: step -1; later: a cache
update found the expert in a staging slot that was free again, and no copy is needed), `evict`
(left its cache slot), `release` (left its staging slot), `withdraw` (a prefetch that never started). An expert holds
memory from its `place`, or the start of its copy, until its `evict` or `release`. On disk, `keep` (held before the
first token) and `drop` (left) say the same of the host's memory, which an expert holds from the start of its `read`.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import count
from struct import pack
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

TEXTS = ("lane", "kind", "phase")
_AT_ONCE = 1024  # rows


class Span(NamedTuple):
    """One piece of work of one lane; times in ns since the start of the run."""

    lane: str
    ready_ns: int
    start_ns: int
    end_ns: int
    kind: str
    phase: str
    step: int
    layer: int
    target_layer: int
    expert: int
    tokens: int
    bytes: int


Row: TypeAlias = tuple[str, int, int, int, str, str, int, int, int, int, int, int]  # a Span's fields


NUMBERS = tuple(name for name in Span._fields if name not in TEXTS)


class SpanRecorder:
    """Collects spans of a run; ``step`` and ``phase`` are those of the current step."""

    __slots__ = ("phase", "rows", "step")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.step = -1
        self.phase = "prefill"

    def instant(self, now: int, kind: str, layer: int, target_layer: int, expert: int, size_bytes: int) -> None:
        """A zero-length span on the copy lane: a change of an expert's memory."""
        self.rows.append(
            ("h2d", now, now, now, kind, self.phase, self.step, layer, target_layer, expert, 0, size_bytes)
        )


def spans_frame(rows: list[Row]) -> pd.DataFrame:
    """Spans as a frame, ordered by start, end and lane; columns as in :class:`Span`."""
    import pandas as pd

    read = read_rows(rows)
    texts = {name: _categorical(read.texts[name]).take(read.places) for name in TEXTS}
    columns = {name: texts[name] if name in TEXTS else read.numbers[name] for name in Span._fields}
    return pd.DataFrame(columns, copy=False)


def _categorical(values: list[str]) -> pd.Categorical:
    """``pd.Categorical(values)``, sixty times as fast where its categories were met before."""
    import pandas as pd

    names = tuple(sorted(set(values)))
    return pd.Categorical.from_codes([names.index(value) for value in values], dtype=_dtype(names), validate=False)


@lru_cache
def _dtype(names: tuple[str, ...]) -> pd.CategoricalDtype:
    import pandas as pd

    return pd.CategoricalDtype(list(names))


class RowsByColumn(NamedTuple):
    """Rows by column, ordered by start, end and lane."""

    texts: dict[str, list[str]]  # of ``TEXTS``, the different combinations that rows have
    places: NDArray[np.int64]  # of each row's combination
    numbers: dict[str, NDArray[np.int64]]  # of ``NUMBERS``


def read_rows(rows: list[Row]) -> RowsByColumn:
    """Read rows by column, and order them."""
    texts, places, numbers = _read(rows)
    lanes = texts["lane"]
    rank = np.array([sorted(set(lanes)).index(lane) for lane in lanes], np.int8)
    order = np.lexsort((rank[places], numbers["end_ns"], numbers["start_ns"]))
    return RowsByColumn(texts, places[order], {name: column.take(order) for name, column in numbers.items()})


def _read(rows: list[Row]) -> RowsByColumn:
    """Columns in the order of the rows.

    A few rows at a time, which stay in the processor's cache, and packed by ``struct``: each halves the time of numpy.
    """
    place_of: defaultdict[tuple[str, ...], int] = defaultdict(count().__next__)
    read = {name: np.empty(len(rows), np.int64) for name in (*NUMBERS, "texts")}
    for begin in range(0, len(rows), _AT_ONCE):
        some = rows[begin : begin + _AT_ONCE]
        values = dict(zip(Span._fields, zip(*some, strict=True), strict=True))
        texts = zip(*(values.pop(name) for name in TEXTS), strict=True)
        for name, column in {**values, "texts": map(place_of.__getitem__, texts)}.items():
            read[name][begin : begin + len(some)] = np.frombuffer(pack(f"{len(some)}q", *column), np.int64)
    texts_of = {name: [texts[i] for texts in place_of] for i, name in enumerate(TEXTS)}
    return RowsByColumn(texts_of, read.pop("texts"), read)
