"""AdapMoE: cache sizes by layer from calibration, one expert prefetched by the next gate, weak experts dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Literal

from policies.calibration import Calibration, Counts
from policies.mechanism.views import LayerView, Routing
from policies.papers.adapmoe.slots_by_misses import SlotsByMisses, SlotsByMissesFull, lru_misses
from policies.parts.assigners import LoadAll
from policies.parts.lru import LruCache
from policies.parts.routers import TrueRouter
from policies.parts.token_routing import routing_of_tokens
from policies.parts.top_prefetch import TopPrefetcher
from policies.protocols import Composition, Needs
from policies.system import BuildContext, ChoiceError, System, at_least

NEEDS = Needs(tokens=True, forecasts=(("gate", 1),), forecast_phases=("decode",), calibration=True, gpu_only=True)


class WeakExpertsRouter(TrueRouter):
    """Drops a token's experts after the first whose share of the token's weights is below a threshold; the others'
    weights are scaled to the sum that they had together with those."""

    def __init__(self, drop_below: float) -> None:
        self.drop_below = drop_below

    def route(self, view: LayerView) -> Routing:
        """The router's own experts, the weak ones left out."""
        ids, weights = view.routing.token_ids, view.routing.token_weights
        kept = [self._strong(row) for row in weights]
        if all(count >= len(row) for count, row in zip(kept, weights, strict=True)):
            return view.routing
        strong_ids = [row[:count] for row, count in zip(ids, kept, strict=True)]
        return routing_of_tokens(strong_ids, [_scaled(row, count) for row, count in zip(weights, kept, strict=True)])

    def _strong(self, weights: Sequence[float]) -> int:
        """How many of a token's experts stay."""
        least = self.drop_below * sum(weights)
        return max(1, sum(weight >= least for weight in weights))


def _scaled(weights: Sequence[float], count: int) -> list[float]:
    """The first ``count`` weights, scaled to the sum of all."""
    total, kept = sum(weights), sum(weights[:count])
    return [weight * total / kept for weight in weights[:count]] if kept else list(weights[:count])


@dataclass(frozen=True)
class AdapMoeParameters:
    """AdapMoE, as read in docs/readings.md.

    prefetch: experts of the next layer that are prefetched, in decode only; at most one, the next gate's likeliest that
        is absent. 0 for none.
    drop_below: drops a token's second expert (with a larger top-k: any after the first) when its share of the sum of
        the token's weights is below this, which changes what the model computes. None: never. The paper derives
        thresholds by layer from the sensitivity of the loss, the released code has them typed in for Mixtral; here it
        is one number.
    start: who is in the caches at first: each layer's most "popular" experts on calibration prompts, or nobody, "empty"
        (ours).
    demand_slots: staging slots for loads of an event that is larger than the layer's cache (ours).

    Prefetches go into the next layer's cache in the place of its least recent expert, but never of one that the gate
    chooses (ours; the paper is silent). The sizes of the layers' caches have the fewest misses on the decode tokens of
    the calibration prompts.
    """

    prefetch: int = 1
    drop_below: float | None = None
    start: Literal["popular", "empty"] = "popular"
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """At most one prefetch; loads need a slot."""
        at_least(self, prefetch=0, demand_slots=1)
        if self.prefetch > 1:
            raise ChoiceError(f"parameter 'prefetch': expected 0 or 1, got {self.prefetch}")


def build(parameters: AdapMoeParameters, context: BuildContext) -> Composition:
    """LRU by layer with sizes from calibration."""
    calibration = context.required_calibration("adapmoe")
    misses, full = _misses(calibration, context.experts), parameters.start == "popular"
    drop_below = parameters.drop_below
    return Composition(
        name="adapmoe",
        placement=SlotsByMissesFull(misses, calibration.popularity) if full else SlotsByMisses(misses),
        router=TrueRouter() if drop_below is None else WeakExpertsRouter(drop_below),
        assigner=LoadAll(),
        prefetcher=TopPrefetcher(1, "gate", "cache", ties="place") if parameters.prefetch else None,
        cache=LruCache(),
        needs=_needs(parameters),
        demand_slots=parameters.demand_slots,
        parameters=asdict(parameters),
    )


def _needs(parameters: AdapMoeParameters) -> Needs:
    drops = parameters.drop_below is not None
    needs = replace(NEEDS, changes_routing=drops)
    return needs if parameters.prefetch else replace(needs, forecasts=(), tokens=drops)


@lru_cache(maxsize=8)
def _misses(calibration: Calibration, experts: int) -> Counts:
    """Counted once for all runs of a sweep. Raises ChoiceError if there is nothing to count."""
    if not calibration.decode_ids.size:
        raise ChoiceError(
            f"policy 'adapmoe' sizes its caches by what decode tokens of calibration prompts would have missed; "
            f"calibration {calibration.source} has no decode tokens: capture it with generated ones"
        )
    return lru_misses(calibration.decode_ids, experts)


ADAPMOE = System(
    name="adapmoe",
    summary="LRU, sizes by layer; the next gate prefetches one",
    source="AdapMoE (arXiv 2408.10284), as read in docs/readings.md#adapmoe",
    parameters=AdapMoeParameters,
    build=build,
    needs=NEEDS,
)
