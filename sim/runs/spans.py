"""Spans: the work of each lane, the one record from which every metric, picture and check is made.

A layer of one step, lane by lane, in the order in which each lane runs them. After each kind: when it is ready (a span
starts when it is ready and its lane free). ``layer`` is the layer at work, ``target_layer`` that it is for; -1: none.

  host  program      the layer before, or the step before, has ended; only with an engine that works between layers
        launch       one for attention, gate, forecasts and shared experts (in layer 0 also for the dense layers): the
                     host runs ahead, ready when it is free
        wait         the routing has come over (end of `routing`); lasts the synchronisation. Another one
                     (target_layer set) for a forecast that does not come with the layer's own routing: in a committed
                     layer, or from a partial forward pass
        plan         end of `wait`. It sees the machine as it is at its start and takes effect at its end; meanwhile the
                     link serves swaps and prefetches
        launch       one per GPU expert in the plan's order, then one for combine: end of `plan`
        foresee      end of the forecast's `routing`, and of its `wait` if it has one; only if the policy looks ahead
                     and a layer follows. Takes effect at its end
        observe      end of `plan`: what the cache learns from the routing, for later layers and steps
  gpu   attention    its launch (layer 0 carries the model's dense layers too), also after the layer before has ended
        gate, speculate (one per forecast computed on the GPU; target_layer set), shared: the same launch.
                     A forecast from a partial forward pass has its own launch, after the experts that are here
        expert       its launch; one that is copied for this layer: its launch and the end of its copy. The first of
                     those that are there lasts first_gpu_ns longer, and each that is copied
        combine      its launch, the CPU's result, and the copies of experts that come with their layer though no token
                     was routed to them (a streamed layer). Where the GPU reads results in place
                     (result_path "direct") that is the end of the last CPU expert, and combine lasts as much longer
                     as reading takes; where they queue ("h2d") it is the end of `result`. The CPU experts of a combine
                     are those of its layer, those precomputed for it, and those that the layer before has deferred
  d2h   routing      end of `gate`; a second one (target_layer set) if the GPU computes forecasts: end of the last
                     `speculate`
        activations  once a layer, if the CPU computes anything of it: end of `plan` (or of `foresee`, if only for
                     precomputations)
        writeback    the start of the copy that displaces the expert, where the policy writes victims back
  cpu   expert       end of `activations`, in the plan's order; the first of a layer lasts first_cpu_ns longer
        precompute   the same, for target_layer
        deferred     the same, after the layer's other CPU experts (the first lasts first_cpu_ns longer only if there
                     are none); the combine of the next layer waits for them, that of their own does not
  h2d   demand       end of the `plan` that asked for it, and a free staging slot if it goes there
        swap         end of the layer that asked for it; prefetch: end of `foresee`; both after every queued demand
        result       end of the last CPU expert of the layer's combine; goes before every copy that has not started

An expert number that is no less than the number of experts in a layer is that of a narrow copy (``NarrowCopies``).

"Its launch", on gpu: the lead, after which the GPU can start, is over. The span lasts at least a tail longer than the
launch (``sim.engine.launching``).

The gpu lane runs in order, so that `combine` also waits for every GPU expert, and `attention` for the layer before;
their ready_ns does not repeat it. On h2d, ``layer`` is the expert's own layer (`withdraw` names it as target_layer).

A layer whose routing was committed ahead is not routed again: it has no gate, routing and wait, and its plan is ready
when the host is free and the layer before has ended.

A layer ends with `combine`, or with `foresee` if that ends later; the next layer's `launch` may be earlier than that.
After the last layer a step ends with spans of layer -1: `launch`, the LM head (an `attention`), a `routing` copy of
the chosen tokens, and a `wait`, whose end is the step's end. The next step's first `launch` comes after it. A step that
verifies drafts begins with two more, `launch` and `draft` (on gpu: all of them, one after the other); the tokens of its
last `wait` are the drafts that it accepts. One that computes tokens again chooses none: its last `routing` has none.
While a CPU expert, a copy and a write-back run at the same time, each runs at its contended rate (``SharedMemory``).
Where the GPU shares their memory or cores, as on host lanes, its spans are longer by what they overlap with copies and
with CPU experts (``GpuLane``), and CPU experts by what they overlap with work that the GPU has been given
(``CpuLane``).

Zero-length spans on h2d say what became of memory: `place` (resident before the first token: step -1; later: a cache
update found the expert in a staging slot that was free again, and no copy is needed), `evict`
(left its cache slot), `release` (left its staging slot), `withdraw` (a prefetch that never started). An expert holds
memory from its `place`, or the start of its copy, until its `evict` or `release`.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import count
from struct import pack
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sim.runs.vocabulary import COPIES, INSTANT, LANES

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COPIES", "INSTANT", "LANES", "TEXTS", "Row", "Span", "SpanRecorder", "spans_frame"]

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
    """The same in the order of the rows.

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
