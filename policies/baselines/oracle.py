"""The clairvoyant policy: every part uses the future of the run.

A reference for the other policies, not a bound on the time per token: each part is the best by its own measure (misses,
the layer's makespan), which does not make their combination the best. It ignores a disk: it moves experts as if
reading them again were free, so that other policies may be faster there, and their regret negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policies.parts.belady import BeladyBypassCache
from policies.parts.exact_assignment import ExactAssigner
from policies.parts.future import Future
from policies.parts.placements import even_slots
from policies.parts.prefetchers import TopPrefetcher
from policies.protocols import Budget, Composition, InitialPlacement, Needs
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count


class FuturePlacement:
    """Even slots, or one pool, filled with experts in the order of their first use."""

    def __init__(self, future: Future, pool: bool = False) -> None:
        self._soonest = sorted(future.first_use, key=lambda expert: (future.first_use[expert], expert))
        self.pool = pool

    def place(self, budget: Budget) -> InitialPlacement:
        """Fill the slots of each layer, or the bytes of the pool."""
        residents: list[list[int]] = [[] for _ in range(budget.layers)]
        slots = [budget.experts] * budget.layers if self.pool else even_slots(budget)
        left = budget.cache_bytes
        for layer, expert in self._soonest:
            if len(residents[layer]) < slots[layer] and budget.expert_bytes[layer] <= left:
                residents[layer].append(expert)
                left -= budget.expert_bytes[layer]
        return InitialPlacement(None if self.pool else tuple(slots), tuple(tuple(sorted(r)) for r in residents))


@register(
    "oracle", "perfect forecasts, Belady with bypass, exact assignment", source="ours; Belady 1966 for the cache"
)
@dataclass(frozen=True)
class Oracle(Policy):
    """All of it is ours.

    pool: one cache over all layers instead of even slots by layer.
    prefetch: how many of the next layer's absent experts to copy, 0 for none; None: all of them.
    into: where they go; in the cache they displace the expert whose next use is farthest away.
    prefetch_slots, demand_slots: staging slots for what the cache declines.
    solver: of the exact assignment.
    """

    needs = Needs(forecasts=(("oracle", 1),), future=True)

    pool: bool = False
    prefetch: NonNegative | None = None
    into: Literal["cache", "staging"] = "cache"
    prefetch_slots: NonNegative = 4
    demand_slots: Count = 2
    solver: Literal["own", "highs"] = "own"

    def compose(self, context: BuildContext) -> Composition:
        """Clairvoyant placement, prefetches and cache; exact assignment."""
        future = context.required_future()
        size = context.experts if self.prefetch is None else self.prefetch
        return Composition(
            placement=FuturePlacement(future, self.pool),
            assigner=ExactAssigner(self.solver),
            prefetcher=TopPrefetcher(size, "oracle", self.into, guard=False) if size else None,
            cache=BeladyBypassCache(future),
            demand_slots=self.demand_slots,
            prefetch_slots=self.prefetch_slots,
        )
