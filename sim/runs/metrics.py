"""Metrics: the numbers of docs/design.md, Metrics, one definition each, made from the spans alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import numpy as np
import pandas as pd

from sim.runs.columns import Bools, Columns, Ints, cells_of, columns_of
from sim.runs.hits import Uses, hit_rates, layer_frame, share, uses_of
from sim.runs.prefetches import Prefetches, prefetches_of
from sim.runs.stalls import STALL_LANES, Stalls, gaps_of
from sim.runs.vocabulary import LANES

__all__ = ["METRIC_TYPES", "Metrics", "layer_frame", "metrics_of", "step_times"]

ByLane: TypeAlias = Mapping[str, float | None]


@dataclass(frozen=True)
class Metrics:
    """Numbers of one run. Shares and rates are fractions; None means that the run had nothing to measure it on.

    Where the name does not say otherwise, a number is about the *decode window*: from the end of the last prefill
    step to the end of the last decode step. A step ends with the host's last ``wait`` (layer -1).
    """

    ttft_ms: float | None  # end of the last prefill step
    tpot_ms: float | None  # mean decode step
    tokens_per_s: float | None  # 1 / TPOT: per sequence
    throughput_tokens_per_s: float | None  # batch / TPOT
    makespan_ms: float  # last end of any span
    steps: int
    decode_steps: int

    resident_hit_rate: float | None  # active experts resident when routed / active; whole run
    token_hit_rate: float | None  # the same, weighted by workload
    gpu_hit_rate: float | None  # of the experts run on the GPU, those resident when routed
    served_hit_rate: float | None  # run on the GPU without a demand load / active
    decode_resident_hit_rate: float | None
    decode_token_hit_rate: float | None
    decode_gpu_hit_rate: float | None
    decode_served_hit_rate: float | None

    prefetches_used: int  # arrived before its layer was routed, and run on the GPU; whole run
    prefetches_late: int  # run on the GPU, but arrived after its layer was routed
    prefetches_wasted: int  # arrived, not used
    prefetches_withdrawn: int  # never started
    prefetch_accuracy: float | None  # active when their layer was next routed / started; whole run

    pcie_demand_bytes_per_token: float | None  # expert copies of decode steps / tokens generated there, whole batch
    pcie_prefetch_used_bytes_per_token: float | None  # used and late
    pcie_prefetch_wasted_bytes_per_token: float | None
    pcie_swap_bytes_per_token: float | None
    pcie_bytes_per_token: float | None  # the sum of the four

    busy_share: ByLane  # busy time / window
    run_busy_share: ByLane  # the same over the whole run
    stall_ms: ByLane  # a decode step, by the lane that the GPU waited for; see sim.runs.stalls
    stall_share: ByLane  # of the window
    plan_overhead_share: float | None  # plan and foresee / window

    def to_dict(self) -> dict[str, float | int | None]:
        """Flat and JSON-ready, in the order above; keys and types are those of ``METRIC_TYPES``."""
        flat: dict[str, float | int | None] = {}
        for name, value in vars(self).items():
            if isinstance(value, Mapping):
                flat.update((_FLAT[name].format(lane), of_lane) for lane, of_lane in value.items())
            else:
                flat[name] = value
        return flat


_FLAT = {
    "busy_share": "{}_busy_share", "run_busy_share": "run_{}_busy_share", "stall_ms": "stall_{}_ms",
    "stall_share": "stall_{}_share",
}  # fmt: skip


def _metric_types() -> dict[str, Any]:
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(Metrics).items():
        lanes = () if name not in _FLAT else STALL_LANES if name.startswith("stall") else LANES
        types.update({_FLAT[name].format(lane): float | None for lane in lanes} if lanes else {name: hint})
    return types


METRIC_TYPES: Mapping[str, Any] = _metric_types()  # of ``Metrics.to_dict``, by key


def metrics_of(spans: pd.DataFrame, batch: int) -> Metrics:
    """Metrics of a run of ``batch`` sequences, from its spans (columns as in :class:`sim.runs.spans.Span`)."""
    c = columns_of(spans)
    cells = cells_of(c)
    makespan = int(c.end.max()) if len(c.end) else 0
    steps = _steps(c)
    window = steps.window()
    count = int(steps.decode.sum())
    uses = uses_of(c, cells)
    prefetches = prefetches_of(c, cells, uses)
    planning = c.where(c.of("plan", "foresee")).within(*window)
    values: dict[str, Any] = {
        **_times(steps, batch), "makespan_ms": makespan / 1e6, "steps": len(steps.end), "decode_steps": count,
        **_hits(uses),
        **_prefetches(c, prefetches),
        **_link(c, prefetches, count * batch),
        "busy_share": _busy(c, window), "run_busy_share": _busy(c, (0, makespan)),
        **_stalls(gaps_of(c, cells).within(*window), window, count),
        "plan_overhead_share": share(int(planning.sum()), window[1] - window[0]),
    }  # fmt: skip
    return Metrics(**values)


def step_times(spans: pd.DataFrame) -> pd.DataFrame:
    """One row a step: step, phase, start_ms, end_ms. A step starts where the one before ended, the first at 0."""
    steps = _steps(columns_of(spans))
    phase = np.where(steps.decode, "decode", "prefill")
    return pd.DataFrame(
        {"step": steps.step, "phase": phase, "start_ms": steps.start / 1e6, "end_ms": steps.end / 1e6}
    )


class _Steps(NamedTuple):
    step: Ints
    decode: Bools
    start: Ints
    end: Ints

    def window(self) -> tuple[int, int]:
        """Begin and end of decoding, ns; empty without decode steps."""
        if not self.decode.any():
            return 0, 0
        return int(self.start[self.decode][0]), int(self.end[self.decode][-1])


def _steps(c: Columns) -> _Steps:
    """Steps by their last wait."""
    waits = c.where(c.of("wait") & (c.layer == -1))
    start = np.concatenate([[0], waits.end[:-1]]).astype(np.int64)[: len(waits.end)]
    return _Steps(waits.step, waits.decode, start, waits.end)


def _times(steps: _Steps, batch: int) -> dict[str, float | None]:
    prefill = steps.end[~steps.decode]
    begin, end = steps.window()
    tpot_ns = share(end - begin, int(steps.decode.sum()))
    return {
        "ttft_ms": int(prefill[-1]) / 1e6 if len(prefill) else None,
        "tpot_ms": None if tpot_ns is None else tpot_ns / 1e6,
        "tokens_per_s": share(1e9, tpot_ns or 0),
        "throughput_tokens_per_s": share(batch * 1e9, tpot_ns or 0),
    }


def _hits(uses: Uses) -> dict[str, float | None]:
    rates = {"": hit_rates(uses, False), "decode_": hit_rates(uses, True)}
    return {f"{when}{name}_hit_rate": value for when, rate in rates.items() for name, value in rate._asdict().items()}


def _prefetches(c: Columns, prefetches: Prefetches) -> dict[str, int | float | None]:
    return {
        "prefetches_used": int(prefetches.used.sum()),
        "prefetches_late": int(prefetches.late.sum()),
        "prefetches_wasted": int(prefetches.wasted.sum()),
        "prefetches_withdrawn": int(c.of("withdraw").sum()),
        "prefetch_accuracy": share(int(prefetches.active.sum()), len(prefetches.active)),
    }


def _link(c: Columns, prefetches: Prefetches, tokens: int) -> dict[str, float | None]:
    """Expert bytes of decode steps per generated token, by why they were copied."""
    wasted = int(prefetches.bytes[prefetches.decode & prefetches.wasted].sum())
    moved = {
        "demand": int(c.bytes[c.decode & c.of("demand")].sum()),
        "prefetch_used": int(prefetches.bytes[prefetches.decode].sum()) - wasted,
        "prefetch_wasted": wasted,
        "swap": int(c.bytes[c.decode & c.of("swap")].sum()),
    }
    split = {f"pcie_{why}_bytes_per_token": share(of, tokens) for why, of in moved.items()}
    return {**split, "pcie_bytes_per_token": share(sum(moved.values()), tokens)}


def _busy(c: Columns, window: tuple[int, int]) -> ByLane:
    within, length = c.within(*window), window[1] - window[0]  # spans of one lane never overlap
    return {lane: share(int(within[c.on(lane)].sum()), length) for lane in LANES}


def _stalls(stalls: Stalls, window: tuple[int, int], steps: int) -> dict[str, ByLane]:
    by_lane = dict(zip(STALL_LANES, stalls, strict=True))
    return {
        "stall_ms": {lane: share(ns / 1e6, steps) for lane, ns in by_lane.items()},
        "stall_share": {lane: share(ns, window[1] - window[0]) for lane, ns in by_lane.items()},
    }
