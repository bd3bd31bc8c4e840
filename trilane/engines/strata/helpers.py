"""Strata with helpers in closed form: other cards hold experts that the first one does not.

In each layer a helper gets the rows, computes its experts next to the first card and the pool, and returns a weighted
sum of each row (``--remote-expert-opt``); the first card waits for all. Dense weights, keys and values, drafts and
prompts are the first card's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.units import MIB
from trilane.engines.strata.cache import hit_rate, swapped
from trilane.engines.strata.order import distinct_share
from trilane.engines.strata.requests import WindowCounts
from trilane.engines.strata.window import WindowCosts, WindowTime, window_time

MOST_HELPERS = 3  # --expert-cache-device1..3
# By the host in each layer and helper: copies of rows and plan, quantisation, three kernels of a grouped call, results
# (src/core/peer_experts.cpp, launch). CUDA alone: velox PR 6096.
LAUNCHES, LAUNCH_NS = 7, 2500.0
_COPIES = 2  # to a helper, one behind the other: its rows and its plan
_RESERVE = 512 * MIB  # STRATA_REMOTE_RESERVE_MIB (docs/SECOND_GPU.md)
_BYTES = 4  # of an element that crosses


@dataclass(frozen=True)
class Helped:
    """The first card and its helpers; ``slots`` of each."""

    costs: WindowCosts
    helpers: tuple[Hardware, ...]
    slots: tuple[int, ...]

    @property
    def held_share(self) -> float:
        """Share of all experts that some card holds."""
        return sum(self.slots) / (self.costs.shape.moe_layers * self.costs.shape.experts)

    def hits(self, rows: float, *, same_text: bool = False) -> tuple[float, float]:
        """Share of the entries whose expert the first card has, and the helpers."""
        pairs = self.costs.shape.moe_layers * self.costs.shape.experts
        first = hit_rate(self.slots[0] / pairs, rows, same_text=same_text)
        return first, max(hit_rate(min(self.held_share, 1.0), rows, same_text=same_text) - first, 0.0)


def helper_slots(shape: ModelShape, helper: Hardware) -> int:
    """Experts for which a helper has room, which holds nothing else."""
    pairs = shape.moe_layers * shape.experts
    return max(int((helper.gpu.memory_bytes - _RESERVE) * pairs / shape.routed_bytes), 0)


def helped_slots(shape: ModelShape, first: int, helpers: Sequence[Hardware]) -> tuple[int, ...]:
    """Slots of the first card and its helpers, which together hold no more than there are."""
    left, slots = shape.moe_layers * shape.experts - first, [first]
    for helper in helpers:
        slots.append(min(helper_slots(shape, helper), left))
        left -= slots[-1]
    return tuple(slots)


def helped_time(
    helped: Helped, rows: float, drafts: float, context: int, share: float, *, same_text: bool = False
) -> WindowTime:
    """A window of so many rows, a share of whose misses crosses the first card's link."""
    costs, entries = helped.costs, rows * helped.costs.shape.top_k
    first, others = helped.hits(rows, same_text=same_text)
    counts = WindowCounts(rows, drafts, entries * first, entries * (1 - first - others), 0.0)
    swaps = swapped(min(helped.held_share, 1.0), rows)
    return window_time(costs, counts, context, share, swaps, helpers_ns=helpers_ns(helped, rows, entries * others))


def helpers_ns(helped: Helped, rows: float, entries: float) -> float:
    """Time of a layer's helpers: the host starts one after the other; then they run side by side."""
    costs = helped.costs
    distinct, held = distinct_share(rows, costs.work.repeated.value), sum(helped.slots[1:])
    if not held or not entries:
        return 0.0
    each = [
        exchange_ns(costs, helper, rows)
        + float(replace(costs, hardware=helper).call_ns(entries * distinct * slots / held, 1 / distinct))
        for helper, slots in zip(helped.helpers, helped.slots[1:], strict=True) if slots
    ]
    return len(each) * LAUNCHES * LAUNCH_NS + max(each)


def exchange_ns(costs: WindowCosts, helper: Hardware, rows: float) -> float:
    """The rows to a helper and their sums back, by way of the host's memory, also where the cards have a link: a layer
    goes on when the host has seen that they are there."""
    size, link = rows * costs.shape.hidden * _BYTES, helper.link
    latency_ns = _COPIES * link.h2d_latency_ns + link.d2h_latency_ns + costs.work.handshake_ns.value
    return latency_ns + size / link.h2d_bytes_per_s * 1e9 + size / link.d2h_bytes_per_s * 1e9
