"""Lookups a second of the logical replay behind ``trilane cache-curve``, for every cache policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

from benchmarks.figures import Cell, Section, Target
from benchmarks.traffic import BUNDLED, side_by_side
from traces.library import load_trace
from trilane.study.cache_curve import CURVE_POLICIES, CacheCurve

LOOKUPS_PER_S = 300_000
LAYERS, TOP_K = 48, 6
SHARES = (0.1, 0.3, 0.6)
RUNS = 3


def measure(runs: int = RUNS) -> Section:
    """All cache policies at three sizes; the target is for the slowest of them."""
    curve = CacheCurve(side_by_side(load_trace(BUNDLED), TOP_K, LAYERS))
    lookups = sum(len(event.active) for event in curve.events)
    sizes = [round(share * curve.trace.shape.routed_bytes) for share in SHARES]
    rows: list[list[Cell]] = []
    targets = []
    curve.future  # noqa: B018  # made beforehand: timed below
    for policy in CURVE_POLICIES:
        speeds = [lookups / _seconds(partial(curve.point, policy, size), runs) for size in sizes]
        rows.append([policy, *speeds])
        targets.append(Target(f"cache-curve, {policy}, slowest size", "lookups/s", LOOKUPS_PER_S, min(speeds)))
    events = lookups / _seconds(lambda: CacheCurve(curve.trace).events, 1)
    future = lookups / _seconds(lambda: CacheCurve(curve.trace).future, 1)
    notes = (
        f"{LAYERS} layers x {2 * load_trace(BUNDLED).shape.experts} experts, top-{TOP_K}, {lookups:,} lookups: "
        f"{BUNDLED}, two sequences side by side, layers repeated; median of {runs} replays",
        f"once a trace: reading its events {events:,.0f} lookups/s; for belady also the future, together {future:,.0f}",
    )
    columns = ("cache policy", *(f"lookups/s, {share:.0%} cached" for share in SHARES))
    return Section("Cache-curve replay", columns, rows, targets, notes)


def _seconds(work: Callable[[], object], runs: int) -> float:
    """Median CPU time."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return median(times)
