"""SeqMoE: eviction and prefetches by forecasts of the next tokens, over all layers (arXiv 2609.12978)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from policies.parts.assigners import LoadAll
from policies.parts.forecast_cache import DeadlinePrefetcher, ForecastCache
from policies.parts.placements import PoolPlacement
from policies.protocols import Composition, Needs
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count, above, at_most, between


@register(
    "seqmoe",
    "forecasts of whole tokens: probabilistic Belady, prefetches over a step's end",
    source="SeqMoE (arXiv 2609.12978)",
)
@dataclass(frozen=True)
class SeqMoe(Policy):
    """Known by its abstract, and by what others quote of it.

    steps: tokens that are forecast; the paper has 8, each needs a forecast of the trace (``token@1``, ...) or a stated
        recall.
    prefetch: whether forecast experts are copied ahead.
    discount: how much a use counts against one a token earlier (ours).
    half_life: tokens after which a use counts half in what is expected beyond the forecasts (ours).
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    steps: Annotated[int, between(1, 16)] = 2
    prefetch: bool = True
    discount: Annotated[float, above(0), at_most(0.99)] = 0.5
    half_life: Annotated[float, above(0), at_most(1e6)] = 16.0
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        """A forecast of each token to come."""
        forecasts = tuple(("token", ahead) for ahead in range(1, self.steps + 1))
        return Needs(forecasts=forecasts, gpu_only=True)

    def compose(self, context: BuildContext) -> Composition:
        """One pool over all layers; without prefetches the forecasts go to the cache alone."""
        cache = ForecastCache(self.steps, self.discount, self.half_life)
        return Composition(
            placement=PoolPlacement(),
            assigner=LoadAll(),
            prefetcher=DeadlinePrefetcher(cache, context.layers, self.prefetch),
            cache=cache,
            demand_slots=self.demand_slots,
        )
