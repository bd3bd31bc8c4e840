"""Mixtral-Offloading (Eliseev & Mazur): an LRU cache in every layer, speculative loading by the next layer's gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.mechanism.views import INFINITE_NS, ExpertId, LayerView, Swap
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache
from policies.parts.placements import even_slots
from policies.parts.prefetchers import TopPrefetcher
from policies.protocols import Budget, Composition, InitialPlacement, Needs, When
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count

NEEDS = Needs(forecasts=(("gate", 1),), forecast_phases=("decode",), uniform_sizes=True, gpu_only=True)
WITHOUT_SPECULATION = Needs(gpu_only=True)


class LastExperts:
    """Even slots, full from the start: each layer holds its highest ids, as in the released code (build_model.py)."""

    def place(self, budget: Budget) -> InitialPlacement:
        slots = even_slots(budget)
        residents = tuple(tuple(range(budget.experts - count, budget.experts)) for count in slots)
        return InitialPlacement(tuple(slots), residents)


class SpeculativeLruCache(LruCache):
    """LRU by layer that admits a speculatively loaded expert only when it has been used: it then replaces the least
    recently used expert that the layer did not use just now. It is still in its staging slot, so nothing is copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self._speculated: list[ExpertId] = []  # active experts of the layer at work that were loaded ahead

    def observe(self, view: LayerView) -> None:
        """Note the active experts that are staged or in flight without being resident."""
        super().observe(view)
        layer, ready = view.layer, view.ready_ns
        resident = view.residency.resident[layer]
        came = (e for e in view.routing.active if ready.get(e, INFINITE_NS) != INFINITE_NS and e not in resident)
        self._speculated = [ExpertId(layer, expert) for expert in came]

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        """At the end of the layer: speculated experts that it used for the least recent ones that it did not."""
        if when != "layer_end" or not self._speculated:
            return ()
        layer, swaps = view.layer, []
        resident = view.residency.resident[layer]
        blocked = {ExpertId(layer, expert) for expert in view.routing.active}
        for key in self._speculated:
            outgoing = self.victim(key, layer, blocked)
            if outgoing is not None and key.expert not in resident:
                blocked.add(outgoing)
                swaps.append(Swap(key, outgoing))
        return swaps


@register(
    "mixtral-offloading",
    "LRU by layer; the next gate loads ahead",
    source="Eliseev & Mazur (arXiv 2312.17238), Sections 3.1-3.2; docs/readings.md#mixtral-offloading",
)
@dataclass(frozen=True)
class MixtralOffloading(Policy):
    """Eliseev & Mazur, Section 3.

    speculate: experts of the next layer that are loaded ahead, 0 for none. The paper loads one or two; 2 is Mixtral's
        top-k. They are taken from the next gate's choice for the present hidden state, the likeliest absent ones first,
        in decode only, which is what the paper speeds up.
    demand_slots: staging slots for loads of an event that is larger than the cache (ours).

    Speculated experts wait in 2 x ``speculate`` staging slots (the paper's four buffers), half of them for the layer at
    work and half for the next, and enter the cache only if they are used (our reading of a cache and a buffer apart).
    The start is the released code's: the last experts of each layer are resident. Quantisation belongs to the model.
    """

    speculate: NonNegative = 2
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        return NEEDS if self.speculate else WITHOUT_SPECULATION

    def compose(self, context: BuildContext) -> Composition:
        """LRU by layer with speculative loading."""
        size = self.speculate
        return Composition(
            placement=LastExperts(),
            assigner=LoadAll(),
            prefetcher=TopPrefetcher(size, "gate", "staging") if size else None,
            cache=SpeculativeLruCache(),
            demand_slots=self.demand_slots,
            prefetch_slots=2 * size,
        )


@register(
    "mixtral-offloading@impl",
    "LRU by layer; every load writes an expert back",
    source="dvmazur/mixtral-offloading ce54518; docs/readings.md#mixtral-offloading",
)
@dataclass(frozen=True)
class MixtralOffloadingImpl(Policy):
    """The released code (commit ce54518, ``expert_cache.py``).

    buffers: its ``buffer_size``, the staging slots. There each load, here only one that the cache cannot take, passes
        through them; there at most 3 are under way, here the link carries one copy at a time anyway.

    Each load writes an expert back, in the stream in which it was copied, so that the two directions take turns: its
    victim, or, where an event is larger than the cache, itself, in place of an expert of the same event. Which experts
    of such an event are left in the cache is not followed: here those that were there, in the code the last ones.
    """

    needs = WITHOUT_SPECULATION

    buffers: Count = 4

    def compose(self, context: BuildContext) -> Composition:
        """LRU by layer; an evicted expert is copied back to the host."""
        return Composition(
            placement=LastExperts(),
            assigner=LoadAll(),
            cache=LruCache(),
            writes_back="in turn",
            demand_slots=self.buffers,
        )
