"""Settings of Strata and what they change: slots of the cache, drafts by a threshold, speed of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scipy.stats import beta

from sim.costs.window_work import gpu_cache_bytes, kv_bytes, kv_width
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.units import MIB
from trilane.engines.strata.cache import hit_rate, swapped
from trilane.engines.strata.requests import WindowCounts
from trilane.engines.strata.window import WindowCosts, WindowTime, window_time

SHARES = (0.0, 0.1, 0.2, 0.3, 0.35, 0.45, 0.55, 0.65, 0.75)
THRESHOLDS = (0.3, 0.5, 0.7)
KV_TOKENS = (0, 20480, 32768)  # --kv-resident: none, the least and what setup writes from a context of
STREAMED_FROM = 65536  # tokens (release 0.1.5)
WORTH_WORKERS = 0.03  # of the time: what a larger pool must save; the engine's own calibration asks as much of a value
# Of a draft's own probability: how often it is right. A beta distribution of this mean and sum gives 2.1 drafts a
# window and 70 % of them accepted with a threshold of 0.5, as 35 open requests of 2026-11 have in the mean.
ACCEPTED, CERTAINTY = 0.658, 1.71
# Startup logs of three cards: draft layer, its head, buffers of windows.
_DRAFT_LAYER, _DRAFT_HEAD, _BUFFERS = (size * MIB for size in (835, 213, 90))


@dataclass(frozen=True)
class StrataSetting:
    """``pcie_share``: of the misses over the link (--pcie-frac). ``workers``: of the pool (--pool-workers).
    ``min_draft_probability``: --spec-min-p. ``slots``: experts in the cache. ``kv_tokens``: whose keys and values the
    card has, while the host has those of all (--kv-resident); 0: the card has all."""

    pcie_share: float
    workers: int
    min_draft_probability: float
    slots: int
    kv_tokens: int = 0


class Drafts(NamedTuple):
    """Mean drafts that a window verifies, and how many are accepted."""

    verified: float
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
    """Drafts where each is verified, and followed by another one, if its probability is at least ``threshold``
    (``src/program/generate.cpp``). That is the probability of being right, and the same for all drafts of a window."""
    right, wrong = ACCEPTED * CERTAINTY, (1 - ACCEPTED) * CERTAINTY
    numbers, accepted, moment = range(1, rows), 0.0, 1.0
    for number in numbers:
        moment *= (right + number - 1) / (CERTAINTY + number - 1)
        accepted += moment * float(beta(right + number, wrong).sf(threshold))
    return Drafts(len(numbers) * float(beta(right, wrong).sf(threshold)), accepted)


def cache_slots(
    shape: ModelShape, hardware: Hardware, context: int, kv_tokens: int = 0, *, drafts: bool = True
) -> int:
    """Experts for which a card has room next to weights, keys and values of a context, and the draft layer, if it has
    ``drafts``."""
    others = shape.non_expert_bytes - shape.embedding_bytes + gpu_cache_bytes(shape, context, kv_tokens)
    if drafts:
        others += draft_kv_bytes(shape, min(context, kv_tokens or context)) + _DRAFT_LAYER + _DRAFT_HEAD
    left = hardware.gpu.memory_bytes - others - _BUFFERS - hardware.gpu.reserve_bytes
    pairs = shape.moe_layers * shape.experts
    return min(max(round(left * pairs / shape.routed_bytes), 0), pairs)


def host_kv_bytes(shape: ModelShape, context: int) -> int:
    """Keys and values of a context in the host's memory, from which the card takes what it lacks."""
    return kv_bytes(shape, context) + draft_kv_bytes(shape, context)


def draft_kv_bytes(shape: ModelShape, tokens: int) -> int:
    """Keys and values of the draft layer, which is one of sparse attention."""
    layers = sum(number for kind, number in shape.attention_counts if kv_width(kind))
    return kv_bytes(shape, tokens) // layers


def usual_kv_tokens(context: int) -> int:
    """Tokens whose keys and values setup leaves on the card, for a context; 0: all."""
    return KV_TOKENS[-1] if context >= STREAMED_FROM else 0


def strata_speed(
    costs: WindowCosts, setting: StrataSetting, context: int, drafts: Drafts | None = None, *, same_text: bool = False
) -> StrataSpeed:
    """The speed of a setting in the middle of an answer. ``drafts``: None, by its threshold. ``same_text``: to what was
    asked before."""
    drafts = drafts or drafts_of(setting.min_draft_probability, costs.work.rows.value)
    costs = costs.with_setting(setting.workers, setting.kv_tokens)
    rows, share = 1 + drafts.verified, setting.slots / (costs.shape.moe_layers * costs.shape.experts)
    entries = rows * costs.shape.top_k
    hits = entries * hit_rate(min(share, 1.0), rows, same_text=same_text)
    counts = WindowCounts(rows, drafts.verified, hits, entries - hits, 0.0)
    time = window_time(costs, counts, context, setting.pcie_share, swapped(min(share, 1.0), rows))
    return StrataSpeed(setting, counts, time, 1 + drafts.accepted)


def worker_numbers(hardware: Hardware) -> tuple[int, ...]:
    """Numbers of the pool's workers that the engine's calibration tries: all cores but one, parts of them, fast cores,
    those of a socket."""
    cpu = hardware.cpu
    most = cpu.cores - 1
    tried = (most, most * 2 // 3, most // 2, most // 4, cpu.fast_cores - 1, cpu.cores // cpu.sockets - 1)
    return tuple(dict.fromkeys(max(number, 1) for number in tried))
