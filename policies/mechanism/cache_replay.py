"""Logical replay: hits of a cache on a sequence of routing events, without time, copies or devices.

The caches are those that the simulator runs. An event is one layer of one step: its distinct experts are looked up
together, then those that missed ask for slots in the cache's order. No eviction takes an expert that the event uses;
what finds no room passes through. (One by one, the accesses would favour LRU by a quarter and more.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policies.mechanism.views import ExpertId, LayerView, Phase, PolicyError, ResidencyView, Routing
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
    """Lookups and hits, of the whole replay and of its decode steps; hits are of experts resident when looked up."""

    lookups: int
    hits: int
    lookups_decode: int
    hits_decode: int

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
    slots = _Slots(cache, budget, placement or PoolPlacement())
    resident, view_of = slots.resident, ResidencyView(slots.resident, [()] * budget.layers)
    lookups, hits = {"prefill": 0, "decode": 0}, {"prefill": 0, "decode": 0}
    observe, swaps = cache.observe, cache.swaps
    for step, layer, phase, active, tokens in events:
        here = resident[layer]
        missing = [expert for expert in active if expert not in here]
        lookups[phase] += len(active)
        hits[phase] += len(active) - len(missing)
        routing = Routing(active, tokens or (1,) * len(active))
        view = LayerView(step, layer, phase, routing, None, (), {}, 0, 0, (), view_of)
        observe(view)
        if missing and cache.admits:
            slots.admit(layer, active, missing)
        for incoming, outgoing in swaps(view, "layer_end"):
            slots.replace(incoming, (outgoing,))
    return ReplayResult(sum(lookups.values()), sum(hits.values()), lookups["decode"], hits["decode"])


class _Slots:
    """Who is resident, and how many bytes each group has left."""

    def __init__(self, cache: Cache, budget: Budget, placement: Placement) -> None:
        start = placement.place(budget)
        self.resident: list[set[int]] = [set() for _ in budget.expert_bytes]
        self._cache = cache
        self._bytes = budget.expert_bytes
        self._ids = [[ExpertId(layer, expert) for expert in range(budget.experts)] for layer in range(budget.layers)]
        pooled = start.slots is None
        self._group = [0 if pooled else layer for layer in range(budget.layers)]
        self._free = [budget.cache_bytes]
        if start.slots is not None:
            self._free = [count * size for count, size in zip(start.slots, budget.expert_bytes, strict=True)]
        for layer, experts in enumerate(start.residents):
            for expert in experts:
                self.replace(self._ids[layer][expert], ())
        if sum(self._free) < 0 or min(self._free) < 0:
            raise PolicyError(f"replay: the residents of {type(placement).__name__} do not fit its slots")

    def admit(self, layer: int, active: Sequence[int], missing: Sequence[int]) -> None:
        """Make room for the experts of one event that missed, as far as the cache lets them in."""
        ids, group, size = self._ids[layer], self._group[layer], self._bytes[layer]
        cache, free = self._cache, self._free
        pinned = {ids[expert] for expert in active}
        for id in cache.order([ids[expert] for expert in missing]):
            if free[group] >= size:
                self.replace(id, ())
                continue
            victims = self._victims(id, group, size - free[group], pinned)
            if victims:
                self.replace(id, victims)

    def _victims(self, incoming: ExpertId, group: int, short: int, pinned: set[ExpertId]) -> list[ExpertId]:
        """Members worth ``short`` bytes that the cache gives up for ``incoming``; none if it gives up too few."""
        victims: list[ExpertId] = []
        blocked = pinned
        while short > 0:
            victim = self._cache.victim(incoming, group, blocked)
            if victim is None:
                return []
            short -= self._bytes[victim.layer]
            victims.append(victim)
            if short > 0:
                blocked = {*pinned, *victims}
        return victims

    def replace(self, incoming: ExpertId, outgoing: Sequence[ExpertId]) -> None:
        """``outgoing`` leave, ``incoming`` takes their room."""
        group = self._group[incoming.layer]
        for id in outgoing:
            self.resident[id.layer].remove(id.expert)
            self._free[group] += self._bytes[id.layer]
            self._cache.evicted(id, group)
        self.resident[incoming.layer].add(incoming.expert)
        self._free[group] -= self._bytes[incoming.layer]
        self._cache.admitted(incoming, group)
