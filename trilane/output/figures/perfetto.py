"""Timelines for ui.perfetto.dev: runs as Chrome Trace Event JSON, a process a policy and a thread a lane."""

from __future__ import annotations

import gzip
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sim.runs.run import Run
from sim.runs.spans import Span
from sim.runs.vocabulary import COPIES, GPU_LANES, Link, lanes_with
from trilane.common.files import atomic_path

Event = dict[str, Any]
_COURSE = 0  # the thread that shows steps and layers; lanes are 1, 2, ...


def trace_events(run: Run, pid: int = 1, first_steps: int | None = None) -> Iterator[Event]:
    """Events of one run. Slices of a thread never overlap, but for layers, which lie within their steps.

    ``first_steps`` leaves out what happens in later steps.
    """
    kept = run.spans if first_steps is None else run.spans[run.spans["step"] < first_steps]
    spans = list(map(Span._make, kept[list(Span._fields)].itertuples(index=False, name=None)))
    lanes = lanes_with(set(run.spans["lane"]))
    yield from _names(run.policy, pid, lanes)
    yield from _course(spans, pid)
    arrows = _arrows(spans)
    for number, span in enumerate(spans):
        tid = 1 + lanes.index(span.lane)
        event: Event = {"name": _title(span), "cat": span.kind, "pid": pid, "tid": tid, "ts": _us(span.start_ns)}
        yield {"ph": "X", **event, **_duration(span)} if span.end_ns > span.start_ns else {"ph": "i", "s": "t", **event}
        for phase, arrow in arrows.get(number, ()):
            # An arrow belongs to the slice before it in the file that covers its time. Its id is a number that no
            # other run has: Perfetto reads text as base 16 and leaves out what is not.
            yield {"ph": phase, "bp": "e", "id": (pid << 32) + arrow, "name": "brings", "cat": "copy", "pid": pid,
                   "tid": tid, "ts": _us(span.start_ns)}
    yield from _memory(spans, pid)


def write_perfetto(runs: Sequence[Run], path: str | Path, first_steps: int | None = None) -> None:
    """Write runs into one timeline, aside first and then renamed; compressed if the name ends in ``.gz``."""
    events = (event for pid, run in enumerate(runs, 1) for event in trace_events(run, pid, first_steps))
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    text = f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'.encode()
    with atomic_path(path) as aside:
        aside.write_bytes(_packed(text) if Path(path).suffix == ".gz" else text)


def _packed(text: bytes) -> bytes:
    """Gzip without name, time or system: the same bytes under every Python (``gzip.compress`` writes the system)."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=packed, mtime=0) as file:
        file.write(text)
    return packed.getvalue()


def _us(ns: int) -> float:
    """Microseconds whose thousandfold is ``ns`` even where a reader cuts instead of rounding."""
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.inf)


def _names(policy: str, pid: int, lanes: Sequence[str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": _COURSE, "args": {"name": policy}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": _COURSE, "args": {"sort_index": pid}}
    for tid, name in enumerate(("steps and layers", *lanes)):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _course(spans: Sequence[Span], pid: int) -> Iterator[Event]:
    """Steps, and within them layers, from the spans of host and GPU."""
    bounds: dict[tuple[int, int], tuple[int, int, str]] = {}  # (step, layer; -1 = the step): start, end, phase
    for span in spans:
        places = [(span.step, -1)] if span.lane in ("host", *GPU_LANES) else []
        if span.lane in GPU_LANES and span.layer >= 0:
            places.append((span.step, span.layer))
        for place in places:
            start, end, _ = bounds.get(place, (span.start_ns, span.end_ns, ""))
            bounds[place] = (min(start, span.start_ns), max(end, span.end_ns), span.phase)
    for (step, layer), (start, end, phase) in sorted(bounds.items()):
        name = f"{phase} step {step}" if layer < 0 else f"layer {layer}"
        yield {"ph": "X", "name": name, "cat": "course", "pid": pid, "tid": _COURSE, "ts": _us(start),
               "dur": _us(end - start)}


def _title(span: Span) -> str:
    """The text on the slice."""
    if span.expert < 0:
        return span.kind
    elsewhere = span.lane.startswith((Link.H2D, Link.DISK))  # whose spans may be about any layer
    return f"{span.kind} {_place(span)[0]}/{span.expert}" if elsewhere else f"{span.kind} {span.expert}"


def _duration(span: Span) -> Event:
    """Duration and arguments of a slice, which an instant lacks."""
    args: Event = {"step": span.step, "layer": span.layer, "waited_us": _us(span.start_ns - span.ready_ns)}
    args |= {n: v for n in ("target_layer", "expert") if (v := getattr(span, n)) >= 0}
    args |= {n: v for n in ("tokens", "bytes") if (v := getattr(span, n)) > 0}
    return {"dur": _us(span.end_ns - span.start_ns), "args": args}


def _arrows(spans: Sequence[Span]) -> dict[int, list[tuple[str, int]]]:
    """The ends of arrows by span number: from each copy to the first GPU span of its expert."""
    arrows: dict[int, list[tuple[str, int]]] = {}
    brought: dict[tuple[int, int], int] = {}
    for number, span in enumerate(spans):
        if span.kind in COPIES:
            brought[_place(span)] = number
        elif span.lane in GPU_LANES and span.kind == "expert" and (copy := brought.pop(_place(span), None)) is not None:
            arrows.setdefault(copy, []).append(("s", copy))
            arrows.setdefault(number, []).append(("f", copy))
    return arrows


def _place(span: Span) -> tuple[int, int]:
    return (span.target_layer if span.target_layer >= 0 else span.layer, span.expert)


def _memory(spans: Sequence[Span], pid: int) -> Iterator[Event]:
    """A counter of the bytes that experts hold on the GPU: from `place` or a copy's start to `evict` or `release`."""
    held = 0
    changes: Counter[int] = Counter()
    for span in spans:
        if span.kind == "place" or span.kind in COPIES:
            changes[span.start_ns] += span.bytes
        elif span.kind in ("evict", "release"):
            changes[span.start_ns] -= span.bytes
    for time, change in sorted(changes.items()):
        held += change
        yield {"ph": "C", "name": "expert bytes on the GPU", "pid": pid, "ts": _us(time), "args": {"bytes": held}}
