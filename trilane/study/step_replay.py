"""One decode step of a run to look at: what each lane does, what the GPU waits for, and which experts it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pandas as pd

from sim.runs.columns import cells_of, columns_of
from sim.runs.metrics import step_times
from sim.runs.run import Run
from sim.runs.spans import Span
from sim.runs.stalls import gaps_of
from sim.runs.vocabulary import COPIES, GPU_LANES
from trilane.common.errors import TrilaneError

_NS_PER_MS = 1e6
Change = Literal["loading", "held", "gone"]


class StepError(TrilaneError):
    """A step that a run does not have."""


class StepSpan(NamedTuple):
    """Work of a lane, in ms since the step began; ``waited_ms``: from when it was ready until its lane was free."""

    lane: str
    kind: str
    start_ms: float
    end_ms: float
    waited_ms: float
    layer: int
    target_layer: int
    expert: int
    tokens: int
    bytes: int


class GpuWait(NamedTuple):
    """Idle time of the GPU, and the lane that it waits for (``sim.runs.stalls``); ``kind`` and ``expert``: of the span
    that ends it."""

    start_ms: float
    end_ms: float
    lane: str
    kind: str
    layer: int
    expert: int


class MemoryChange(NamedTuple):
    """An expert's place in GPU memory from a time on, in ms since the step began."""

    at_ms: float
    layer: int
    expert: int
    change: Change


@dataclass(frozen=True)
class StepReplay:
    """A step. ``held``: layer and expert that are on the GPU when it begins."""

    step: int
    ms: float
    spans: tuple[StepSpan, ...]
    waits: tuple[GpuWait, ...]
    held: tuple[tuple[int, int], ...]
    changes: tuple[MemoryChange, ...]
    resident_hits: int  # experts that the GPU computed without a copy that the layer waited for
    demand_loads: int
    on_cpu: int


def middle_step(run: Run) -> int:
    """The decode step in the middle of the answer: the same for every policy on one routing. Raises StepError."""
    decode = step_times(run.spans).query("phase == 'decode'")["step"].tolist()
    if not decode:
        raise StepError("expected a scenario with decode steps to show one")
    return int(decode[len(decode) // 2])


def checked_step(run: Run, step: int | None) -> int:
    """The number of a step that the run has, by default that of the middle one. Raises StepError for another one."""
    if step is None:
        return middle_step(run)
    steps = step_times(run.spans)["step"]
    if step not in set(steps):
        raise StepError(f"step: expected {min(steps)} to {max(steps)}, got {step}")
    return step


def replayed(run: Run, step: int) -> StepReplay:
    """Return a step of a run. Raises StepError for one that it does not have."""
    checked_step(run, step)
    times: dict[Any, dict[Any, Any]] = step_times(run.spans).set_index("step").to_dict("index")
    begin, end = (round(times[step][f"{side}_ms"] * _NS_PER_MS) for side in ("start", "end"))
    frame = run.spans[(run.spans["end_ns"] >= begin) & (run.spans["start_ns"] < end)]
    spans = [*map(Span._make, frame[list(Span._fields)].itertuples(index=False, name=None))]
    timed = tuple(_timed(span, begin) for span in spans if span.end_ns > max(span.start_ns, begin))
    experts = [span for span in timed if span.kind in ("expert", "deferred")]
    on_gpu = sum(span.lane in GPU_LANES for span in experts)
    loads = sum(span.kind == "demand" for span in timed)
    return StepReplay(
        step, (end - begin) / _NS_PER_MS, timed, tuple(_waits(run.spans, begin, end)), tuple(_held(run.spans, begin)),
        tuple(_changes(spans, begin)), on_gpu - min(loads, on_gpu), loads, len(experts) - on_gpu,
    )


def _timed(span: Span, begin: int) -> StepSpan:
    start, end, waited = (ns / _NS_PER_MS for ns in (
        max(span.start_ns, begin) - begin, span.end_ns - begin, span.start_ns - span.ready_ns
    ))
    return StepSpan(span.lane, span.kind, start, end, waited, span.layer, span.target_layer, span.expert, span.tokens,
                    span.bytes)


def _waits(frame: pd.DataFrame, begin: int, end: int) -> Iterator[GpuWait]:
    """Yield the idle time of the GPU in the step, part by part."""
    columns = columns_of(frame)
    gaps = gaps_of(columns, cells_of(columns))
    gpu = frame[frame["lane"].isin(GPU_LANES) & (frame["start_ns"] >= begin) & (frame["start_ns"] <= end)]
    waiters = {row["start_ns"]: row for row in gpu.to_dict("records")}
    for first, disk, cpu, h2d, last in zip(*gaps, strict=True):
        if last <= begin or first >= end:
            continue
        waiter = waiters.get(last, {"kind": "", "layer": -1, "expert": -1})
        for lane, start, until in (
            ("disk", first, disk), ("cpu", disk, cpu), ("h2d", cpu, h2d), ("host", h2d, last)
        ):
            low, high = max(int(start), begin) - begin, min(int(until), end) - begin
            if high > low:
                yield GpuWait(low / _NS_PER_MS, high / _NS_PER_MS, lane, str(waiter["kind"]), int(waiter["layer"]),
                              int(waiter["expert"]))


def _home(span: Span) -> tuple[int, int]:
    """Layer and number of an expert, also where it is copied or placed for a later layer."""
    return (span.target_layer if span.target_layer >= 0 else span.layer), span.expert


def _held(frame: pd.DataFrame, begin: int) -> list[tuple[int, int]]:
    """Experts that have memory when the step begins."""
    before = frame[(frame["start_ns"] < begin) & frame["kind"].isin(["place", "evict", "release", *COPIES])]
    held: dict[tuple[int, int], None] = {}
    for span in map(Span._make, before[list(Span._fields)].itertuples(index=False, name=None)):
        if span.kind in ("evict", "release"):
            held.pop(_home(span), None)
        else:
            held[_home(span)] = None
    return sorted(held)


def _changes(spans: Iterable[Span], begin: int) -> list[MemoryChange]:
    """Changes of memory in the order of their times."""
    found: list[tuple[int, MemoryChange]] = []

    def add(at_ns: int, span: Span, change: Change) -> None:
        at = max(at_ns - begin, 0)
        found.append((at, MemoryChange(at / _NS_PER_MS, *_home(span), change)))

    for span in spans:
        if span.kind in COPIES:
            add(span.start_ns, span, "loading")
            add(span.end_ns, span, "held")
        elif span.kind == "place":
            add(span.start_ns, span, "held")
        elif span.kind in ("evict", "release"):
            add(span.start_ns, span, "gone")
    return [change for _, change in sorted(found, key=lambda each: each[0])]
