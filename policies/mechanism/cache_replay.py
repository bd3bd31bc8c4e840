"""Logical replay: hits of a cache on a sequence of routing events, without time, copies or devices.

Caches and residency are those of the simulator. An event is one layer of one step: its distinct experts are looked up
together, then those that missed are given slots in the cache's order. No expert that the event uses is evicted; one
without room passes through. (Looked up one by one, accesses would favour LRU by a quarter and more.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from policies.mechanism.residency import Residency
from policies.mechanism.views import LayerView, Phase, Routing, Swap
from policies.parts.placements import PoolPlacement
from policies.protocols import Budget, Cache, Placement


class ReplayEvent(NamedTuple):
    """Distinct experts that one layer used in one step; ``tokens`` of each matter to workload caches only."""

    step: int
    layer: int
    phase: Phase
    active: tuple[int, ...]
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReplayResult:
    """Lookups and hits, of the whole replay and of its decode steps; hits are of experts resident when looked up.

    ``misses``: of each event.
    """

    lookups: int
    hits: int
    lookups_decode: int
    hits_decode: int
    misses: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        """Hits by lookup, prefill and decode together."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def hit_rate_decode(self) -> float:
        """Hits by lookup in decode."""
        return self.hits_decode / self.lookups_decode if self.lookups_decode else 0.0


def replay(
    events: Iterable[ReplayEvent], cache: Cache, budget: Budget, placement: Placement | None = None
) -> ReplayResult:
    """Count the hits of a fresh ``cache`` with the slots and residents of ``placement`` (default: one empty pool)."""
    residency = Residency(budget, (placement or PoolPlacement()).place(budget), cache)
    resident, ids = residency.resident, residency.ids
    lookups, hits = {"prefill": 0, "decode": 0}, {"prefill": 0, "decode": 0}
    misses: list[int] = []
    observe, swaps = cache.observe, cache.swaps
    for step, layer, phase, active, tokens in events:
        here = resident[layer]
        missing = [expert for expert in active if expert not in here]
        lookups[phase] += len(active)
        hits[phase] += len(active) - len(missing)
        misses.append(len(missing))
        routing = Routing(active, tokens or (1,) * len(active))
        view = LayerView(step, layer, phase, routing, None, (), {}, 0, 0, (), residency.view)
        observe(view)
        if missing and cache.admits:
            pinned = {ids[layer][expert] for expert in active}
            for key in cache.order([ids[layer][expert] for expert in missing]):
                victims = residency.promise(key, pinned)
                if victims is not None:
                    residency.fill(key, victims)
        for update in swaps(view, "layer_end"):
            if isinstance(update, Swap):
                residency.fill(update.incoming, residency.promise_slot_of(update.incoming, update.outgoing))
    return ReplayResult(sum(lookups.values()), sum(hits.values()), lookups["decode"], hits["decode"], tuple(misses))
