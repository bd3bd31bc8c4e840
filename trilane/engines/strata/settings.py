"""Settings of Strata and what they change: slots of the cache, drafts by a threshold, speed of an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from scipy.stats import beta

from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.units import MIB
from trilane.engines.strata.cache import hit_rate
from trilane.engines.strata.requests import WindowCounts
from trilane.engines.strata.window import WindowCosts, WindowTime, window_time

SHARES = (0.0, 0.1, 0.2, 0.3, 0.35, 0.45, 0.55, 0.65, 0.75)
THRESHOLDS = (0.3, 0.5, 0.7)
WORTH_WORKERS = 0.03  # of the time: what a larger pool must save; the engine's own calibration asks as much of a value
# Of a draft's own probability: how often it is right. A beta distribution of this mean and sum gives 2.4 drafts a
# window and 69 % of them accepted with a threshold of 0.5, as the open requests have in the mean.
ACCEPTED, CERTAINTY = 0.75, 1.0
# Startup logs of three cards: draft layer, its head, buffers of windows.
_DRAFT_LAYER, _DRAFT_HEAD, _BUFFERS = (size * MIB for size in (835, 213, 90))


@dataclass(frozen=True)
class StrataSetting:
    """``pcie_share``: of the misses over the link (--pcie-frac). ``workers``: of the pool (--pool-workers).
    ``min_draft_probability``: --spec-min-p. ``slots``: experts in the cache."""

    pcie_share: float
    workers: int
    min_draft_probability: float
    slots: int


class Drafts(NamedTuple):
    """Mean drafts of a window, and how many are accepted."""

    made: float
    accepted: float


@dataclass(frozen=True)
class StrataSpeed:
    """A setting's window and its tokens."""

    setting: StrataSetting
    counts: WindowCounts
    window: WindowTime
    tokens: float

    @property
    def token_ms(self) -> float:
        return self.window.total_ns / 1e6 / self.tokens

    @property
    def hit_rate(self) -> float:
        """Share of the entries that the cache has."""
        return self.counts.hits / sum(self.counts[2:])


def drafts_of(threshold: float, rows: int) -> Drafts:
    """Drafts where each one is followed by another while its probability is at least ``threshold``.

    A draft's probability is that of being right, whatever the ones before it are.
    """
    spread = beta(ACCEPTED * CERTAINTY, (1 - ACCEPTED) * CERTAINTY)
    going_on = float(spread.sf(threshold))
    both = ACCEPTED * float(beta(ACCEPTED * CERTAINTY + 1, (1 - ACCEPTED) * CERTAINTY).sf(threshold))
    numbers = range(rows - 1)
    return Drafts(sum(going_on**number for number in numbers), sum(ACCEPTED * both**number for number in numbers))


def cache_slots(shape: ModelShape, hardware: Hardware, context: int) -> int:
    """Experts for which a card has room next to weights, keys and values of a context, and the draft layer."""
    others = shape.non_expert_bytes - shape.embedding_bytes + shape.cache_bytes(context)
    left = hardware.gpu.memory_bytes - others - _DRAFT_LAYER - _DRAFT_HEAD - _BUFFERS - hardware.gpu.reserve_bytes
    pairs = shape.moe_layers * shape.experts
    return min(max(round(left * pairs / shape.routed_bytes), 0), pairs)


def strata_speed(costs: WindowCosts, setting: StrataSetting, context: int, drafts: Drafts | None = None) -> StrataSpeed:
    """The speed of a setting in the middle of an answer. ``drafts``: None, by its threshold."""
    drafts = drafts or drafts_of(setting.min_draft_probability, costs.work.rows.value)
    costs = replace(costs, threads=setting.workers + 1)
    rows, share = 1 + drafts.made, setting.slots / (costs.shape.moe_layers * costs.shape.experts)
    entries = rows * costs.shape.top_k
    hits = entries * hit_rate(min(share, 1.0), rows)
    counts = WindowCounts(rows, drafts.made, hits, entries - hits, 0.0)
    return StrataSpeed(setting, counts, window_time(costs, counts, context, setting.pcie_share), 1 + drafts.accepted)


def worker_numbers(hardware: Hardware) -> tuple[int, ...]:
    """Numbers of the pool's workers that the engine's calibration tries: all cores but one, parts of them, fast cores,
    those of a socket."""
    cpu = hardware.cpu
    most = cpu.cores - 1
    tried = (most, most * 2 // 3, most // 2, most // 4, cpu.fast_cores - 1, cpu.cores // cpu.sockets - 1)
    return tuple(dict.fromkeys(max(number, 1) for number in tried))
