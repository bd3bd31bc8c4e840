"""Metrics: the numbers of docs/design.md, Metrics, one definition each, made from the spans alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_type_hints

import numpy as np

from sim.runs.columns import Bools, Cells, Columns, Ints, cells_of, columns_of
from sim.runs.hits import Prefetches, Uses, held_by_host, hit_rates, prefetches_of, share, uses_of
from sim.runs.sampling import Weights, weights_of
from sim.runs.stalls import STALL_LANES, STALL_LANES_WITH_DISK, Gaps, gaps_of
from sim.runs.vocabulary import LANES, READS, Link

if TYPE_CHECKING:
    import pandas as pd

ByLane: TypeAlias = Mapping[str, float | None]


@dataclass(frozen=True)
class Metrics:
    """Numbers of one run. Shares and rates are fractions; None means that the run had nothing to measure it on.

    Where the name does not say otherwise, a number is about the *decode window*: from the end of the last prefill
    step to the end of the last decode step. A step ends with the host's last ``wait`` (layer -1).

    Where decode steps are sampled (``sim.runs.sampling``), such a number is the mean over the whole answer: each step
    counts as often as it stands for a step of the answer. Numbers of the whole run, and counts, are those of the steps
    that are played.
    """

    ttft_ms: float | None  # end of the last prefill step
    tpot_ms: float | None  # decode window / tokens of the answer: the mean decode step, unless drafts are accepted
    tokens_per_s: float | None  # 1 / TPOT: per sequence
    throughput_tokens_per_s: float | None  # batch / TPOT
    makespan_ms: float  # last end of any span
    steps: int
    decode_steps: int
    tokens_per_step: float | None  # of each sequence, in decode steps: 1 and the drafts accepted

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
    stall_ms: ByLane  # a token of the answer, by the lane that the GPU waited for; see sim.runs.stalls
    stall_share: ByLane  # of the window
    plan_overhead_share: float | None  # plan and foresee / window
    disk: ByLane  # ``DISK_METRICS``; empty where the host has room for all experts

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
    "stall_share": "stall_{}_share", "disk": "{}",
}
DISK_METRICS = (
    "ram_hit_rate",  # in decode, of experts that the CPU computed or that were copied on demand, those held when routed
    "disk_bytes_per_token",  # read in decode steps / tokens generated there, whole batch
    "disk_ahead_bytes_per_token",  # of these, for copies that no layer waited for yet
)


_KEYS: Mapping[str, Sequence[str]] = {  # of the mappings, in runs with a disk; further GPUs have lanes of their own
    **dict.fromkeys(("busy_share", "run_busy_share"), (*LANES, Link.DISK.value)),
    **dict.fromkeys(("stall_ms", "stall_share"), STALL_LANES_WITH_DISK), "disk": DISK_METRICS,
}


def _metric_types() -> dict[str, Any]:
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(Metrics).items():
        keys = [_FLAT[name].format(key) for key in _KEYS[name]] if name in _FLAT else ()
        types.update(dict.fromkeys(keys, float | None) if keys else {name: hint})
    return types


METRIC_TYPES: Mapping[str, Any] = _metric_types()  # of ``Metrics.to_dict``, by key


# --- windows ----------------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """A part of a run, and how often it counts."""

    begin_ns: int
    end_ns: int
    weight: float


class PlayedSteps(NamedTuple):
    """The steps of a run in order. A step starts where the one before ended, the first at 0."""

    step: Ints
    decode: Bools
    start_ns: Ints
    end_ns: Ints
    generated: Ints  # tokens of each sequence

    def windows(self, weights: Weights) -> list[Stretch]:
        """Stretches of decode steps that stand for themselves, and of those that stand for more, if there are any."""
        alone = self.step < weights.late_step
        parts = ((self.decode & alone, 1), (self.decode & ~alone, weights.later))
        return [
            Stretch(int(self.start_ns[part][0]), int(self.end_ns[part][-1]), weight)
            for part, weight in parts if part.any()
        ]


def played_steps(c: Columns) -> PlayedSteps:
    """The steps of a run, each of which ends with its last wait."""
    waits = c.where(c.of("wait") & (c.layer == -1))
    start = np.concatenate([[0], waits.end[:-1]]).astype(np.int64)[: len(waits.end)]
    idle = c.step[c.of("routing") & (c.layer == -1) & (c.tokens == 0)]  # steps that choose no token
    return PlayedSteps(waits.step, waits.decode, start, waits.end, 1 + waits.tokens - np.isin(waits.step, idle))


def step_times(spans: pd.DataFrame) -> pd.DataFrame:
    """Times of steps, one row each: step, phase, start_ms, end_ms; a step starts where the one before ended."""
    import pandas as pd

    steps = played_steps(columns_of(spans))
    return pd.DataFrame({
        "step": steps.step, "phase": np.where(steps.decode, "decode", "prefill"),
        "start_ms": steps.start_ns / 1e6, "end_ms": steps.end_ns / 1e6,
    })


class Answer(NamedTuple):
    """The windows of a run that make up its answer."""

    windows: list[Stretch]
    tokens: int

    @property
    def duration_ns(self) -> float:
        """Duration of the whole answer in ns."""
        return sum((end - begin) * weight for begin, end, weight in self.windows)

    def share_of(self, c: Columns) -> float | None:
        """Share of the duration that spans take, which must not overlap."""
        ns = sum(int(c.within(begin, end).sum()) * weight for begin, end, weight in self.windows)
        return share(ns, self.duration_ns)

    def busy(self, c: Columns) -> ByLane:
        """Share of the duration in which each lane is busy."""
        ns = dict.fromkeys(c.lanes, 0.0)
        for begin, end, weight in self.windows:
            within = c.within(begin, end)
            for lane in ns:
                ns[lane] += int(within[c.on(lane)].sum()) * weight
        return {lane: share(busy_ns, self.duration_ns) for lane, busy_ns in ns.items()}

    def stalls(self, gaps: Gaps, lanes: Sequence[str]) -> dict[str, ByLane]:
        """Idle time of the GPU by the lane that it waits for: ms a token of the answer, and share of the duration."""
        stalled = [(gaps.within(begin, end), weight) for begin, end, weight in self.windows]
        ns = {lane: sum(stalls[i] * weight for stalls, weight in stalled) for i, lane in enumerate(lanes)}
        return {
            "stall_ms": {lane: share(of / 1e6, self.tokens) for lane, of in ns.items()},
            "stall_share": {lane: share(of, self.duration_ns) for lane, of in ns.items()},
        }


# --- numbers ----------------------------------------------------------------------------------------------------------


def metrics_of(
    spans: pd.DataFrame | Columns, batch: int, answer_tokens: int | None = None, *, whole_prompt: bool = True
) -> Metrics:
    """Metrics of a run of ``batch`` sequences, from its spans (columns as in :class:`sim.runs.spans.Span`), or from
    these as plain arrays.

    ``answer_tokens``: of the answer that the decode steps which were played stand for; None: those that they make.
    ``whole_prompt``: False for a prompt that was not played at its length, and says nothing about the time to first
    token.
    """
    c = spans if isinstance(spans, Columns) else columns_of(spans)
    cells = cells_of(c)
    makespan_ns = int(c.end.max()) if len(c.end) else 0
    steps = played_steps(c)
    decode, made = steps.step[steps.decode].tolist(), steps.generated[steps.decode].tolist()
    weights = weights_of(decode, answer_tokens or sum(made), made)
    answer = Answer(steps.windows(weights), answer_tokens or sum(made))
    uses = uses_of(c, cells)
    prefetches = prefetches_of(c, cells, uses)
    values: dict[str, Any] = {
        **_times(steps, answer, batch, whole_prompt),
        "makespan_ms": makespan_ns / 1e6, "steps": len(steps.end_ns), "decode_steps": len(decode),
        "tokens_per_step": share(sum(made), len(decode)),
        **_hits(uses, weights),
        **_prefetches(c, prefetches),
        **_link(c, prefetches, weights, answer.tokens * batch),
        "busy_share": answer.busy(c), "run_busy_share": Answer([Stretch(0, makespan_ns, 1)], 1).busy(c),
        **answer.stalls(gaps_of(c, cells), STALL_LANES_WITH_DISK if Link.DISK in c.lanes else STALL_LANES),
        "plan_overhead_share": answer.share_of(c.where(c.of("plan", "foresee"))),
        "disk": _disk(c, cells, uses, weights, answer.tokens * batch) if Link.DISK in c.lanes else {},
    }
    return Metrics(**values)


def _times(steps: PlayedSteps, answer: Answer, batch: int, whole_prompt: bool) -> dict[str, float | None]:
    prefill_ns = steps.end_ns[~steps.decode]
    tpot_ns = share(answer.duration_ns, answer.tokens)
    return {
        "ttft_ms": int(prefill_ns[-1]) / 1e6 if len(prefill_ns) and whole_prompt else None,
        "tpot_ms": None if tpot_ns is None else tpot_ns / 1e6,
        "tokens_per_s": share(1e9, tpot_ns or 0),
        "throughput_tokens_per_s": share(batch * 1e9, tpot_ns or 0),
    }


def _hits(uses: Uses, weights: Weights) -> dict[str, float | None]:
    once = np.ones(len(uses.step), np.int64)
    rates = {"": hit_rates(uses, once), "decode_": hit_rates(uses, weights.of(uses.step) * uses.decode)}
    return {f"{when}{name}_hit_rate": value for when, rate in rates.items() for name, value in rate._asdict().items()}


def _prefetches(c: Columns, prefetches: Prefetches) -> dict[str, int | float | None]:
    return {
        "prefetches_used": int(prefetches.used.sum()),
        "prefetches_late": int(prefetches.late.sum()),
        "prefetches_wasted": int(prefetches.wasted.sum()),
        "prefetches_withdrawn": int(c.of("withdraw").sum()),
        "prefetch_accuracy": share(int(prefetches.active.sum()), len(prefetches.active)),
    }


def _disk(c: Columns, cells: Cells, uses: Uses, weights: Weights, tokens: int) -> ByLane:
    """``DISK_METRICS``."""
    held = held_by_host(c, cells).readable(cells, cells.expert(uses.layer, uses.expert), uses.routed)
    needed = weights.of(uses.step) * uses.decode * (~uses.on_gpu | uses.loaded)
    read = c.size_bytes * weights.of(c.step) * c.decode
    values = (
        share(needed[held].sum().item(), needed.sum().item()), share(read[c.of(*READS)].sum().item(), tokens),
        share(read[c.of("read_ahead")].sum().item(), tokens),
    )
    return dict(zip(DISK_METRICS, values, strict=True))


def _link(c: Columns, prefetches: Prefetches, weights: Weights, tokens: int) -> dict[str, float | None]:
    """Expert bytes of decode steps per generated token, by why they were copied."""
    copied = c.size_bytes * weights.of(c.step) * c.decode
    ahead = prefetches.size_bytes * weights.of(prefetches.step) * prefetches.decode
    wasted = ahead[prefetches.wasted].sum().item()
    moved = {
        "demand": copied[c.of("demand")].sum().item(),
        "prefetch_used": ahead.sum().item() - wasted,
        "prefetch_wasted": wasted,
        "swap": copied[c.of("swap")].sum().item(),
    }
    split = {f"pcie_{why}_bytes_per_token": share(of, tokens) for why, of in moved.items()}
    return {**split, "pcie_bytes_per_token": share(sum(moved.values()), tokens)}
