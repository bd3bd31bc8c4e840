"""Pre-gated MoE: the gate of each layer chooses the experts of the next one, which are copied meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache, StaticCache
from policies.parts.placements import NoPlacement
from policies.parts.prefetchers import TopPrefetcher
from policies.protocols import Composition, Needs
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count


@register(
    "pre-gated",
    "each gate chooses the next layer's experts, which are copied ahead",
    source="Pre-gated MoE (ISCA 2024, arXiv 2308.12066); DAOP, Fig. 8",
)
@dataclass(frozen=True)
class PreGated(Policy):
    """The paper trains the gates anew, so that the choice for a layer is made by the one before; here the trace's
    routing is taken to be that choice. On a model whose gates were not trained so this is clairvoyance, and it is
    marked as such. The first layer of a step is routed by its own gate, and copied then.

    cache: "none" keeps nothing, as in the paper; "lru" keeps what was copied, by layer (ours).
    buffer_experts: experts of a layer that fit each of the two buffers. None: what a decode step may need, that is
        top-k for every sequence of the batch, at most a whole layer.
    """

    needs = Needs(forecasts=(("oracle", 1),), future=True, gpu_only=True)

    cache: Literal["none", "lru"] = "none"
    buffer_experts: Count | None = None

    def compose(self, context: BuildContext) -> Composition:
        """Loads for the first layer, and for those that follow prefetches that are always right."""
        size = self.buffer_experts or min(context.top_k * context.batch, context.experts)
        keeps = self.cache == "lru"
        return Composition(
            placement=NoPlacement(),
            assigner=LoadAll(),
            prefetcher=TopPrefetcher(context.experts, "oracle", "cache" if keeps else "staging"),
            cache=LruCache() if keeps else StaticCache(),
            demand_slots=size,
            prefetch_slots=2 * size,
            parameters={"buffer_experts": size},
        )
