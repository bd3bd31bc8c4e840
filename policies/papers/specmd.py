"""SpecMD's Least-Stale eviction: experts that the last turn of their layer left unused go first (arXiv 2602.03921)."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from policies.mechanism.views import ExpertId, LayerView
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache
from policies.parts.placements import PoolPlacement
from policies.parts.prefetchers import TopPrefetcher
from policies.protocols import Composition, Needs
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count


class LeastStaleCache(LruCache):
    """Layers are at work in turn, which an LRU over all layers does not know: it evicts those whose turn is next.

    A member is *stale* if the last turn of its layer did not use it. Stale members go first, and of these the one whose
    layer is at work last from now on; then the others in the same order. In a layer the least recent one goes.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self._layers = layers
        self._used: dict[tuple[int, int], int] = {}  # the step of an expert's last use, or of its admission
        self._turn = [-1] * layers  # the step in which a layer was at work last
        self._layer, self._step = 0, -1

    def observe(self, view: LayerView) -> None:
        """A turn of the layer; the members that it used become its most recent."""
        super().observe(view)
        self._layer, self._step = view.layer, view.step
        self._turn[view.layer] = view.step
        self._used.update(((view.layer, expert), view.step) for expert in view.routing.active)

    def admitted(self, key: ExpertId, group: int) -> None:
        """The most recent of its layer, whose members are a group of their own."""
        super().admitted(key, group * self._layers + key.layer)
        self._used[key] = self._step

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The first of the layers' least recent members."""
        first_in, first = super().victim, group * self._layers
        firsts = [first_in(incoming, first + layer, blocked) for layer in range(self._layers)]
        return min((key for key in firsts if key is not None), key=self._order_of, default=None)

    def _order_of(self, key: ExpertId) -> tuple[bool, int]:
        """Less for those that may leave sooner."""
        return self._used[key] >= self._turn[key.layer], -((key.layer - self._layer - 1) % self._layers)


@register(
    "least-stale",
    "one cache; what its layer's last turn left unused goes first",
    source="SpecMD, Least-Stale (arXiv 2602.03921)",
)
@dataclass(frozen=True)
class LeastStale(Policy):
    """The text is known by its abstract: the reading of staleness is ours.

    prefetch: absent experts of the next layer that its gate forecasts, copied to the cache, 0 for none. None: top-k of
        the model (SpecMD compares several; ours).
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    prefetch: NonNegative | None = None
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        return Needs(forecasts=() if self.prefetch == 0 else (("gate", 1),), gpu_only=True)

    def compose(self, context: BuildContext) -> Composition:
        """One pool, prefetches by the next gate, and loads."""
        size = context.top_k if self.prefetch is None else self.prefetch
        return Composition(
            placement=PoolPlacement(),
            assigner=LoadAll(),
            prefetcher=TopPrefetcher(size, "gate", "cache") if size else None,
            cache=LeastStaleCache(context.layers),
            demand_slots=self.demand_slots,
            parameters={"prefetch": size},
        )
