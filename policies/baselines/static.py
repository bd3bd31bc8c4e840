"""Baselines that decide nothing.

On-demand offloading: every expert runs on the GPU, those that miss are copied after routing. Without copies: whole
layers on the GPU, and everything on the CPU. And whole layers that are streamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policies.parts.assigners import LoadAll, ResidentOrCpu, StreamLayer
from policies.parts.caches import LruCache, StaticCache
from policies.parts.placements import LayerWisePlacement, NoPlacement, PoolPlacement, PopularityPlacement
from policies.parts.prefetchers import NextLayer
from policies.protocols import Assigner, Composition, Needs, Placement
from policies.system import BuildContext, ChoiceError, Policy, register
from trilane.common.hints import Count


@register(
    "on-demand",
    "experts are copied when they are routed to; LRU cache",
    source="Speculating Experts, Section 5 (baseline); DAOP, MoE-OnDemand; LRU after Mixtral-Offloading",
)
@dataclass(frozen=True)
class OnDemand(Policy):
    """The least that offloading can do. The default, an LRU by layer that starts empty and fills at the expense of the
    first token, is ours. Two papers have a baseline of this kind, and neither is the default:

    "On-demand" of Speculating Experts (Section 5) is ``cache="none"``. Loads pass through staging, and the budget's
    cache slots stay empty; ``demand_slots=1`` copies the next expert only when the last one has been computed, which is
    that paper's sum of copies and computation. "MoE-OnDemand" of DAOP is ``start="popular"``, with the calibrated
    dominant experts on the GPU; the paper does not say which expert is evicted, here the least recently used one.

    pool: one LRU over all layers instead of one a layer (Mixtral-Offloading caches by layer).
    demand_slots: staging slots for loads that are not admitted; 2 let one copy run while another is computed (ours).
    cache: "lru" keeps what was loaded; "none" keeps nothing.
    start: "empty", or each layer's most "popular" experts on calibration prompts, divided as DAOP does (Section IV-A).
    """

    pool: bool = False
    demand_slots: Count = 2
    cache: Literal["lru", "none"] = "lru"
    start: Literal["empty", "popular"] = "empty"

    def __post_init__(self) -> None:
        """Popular residents need an LRU with slots by layer."""
        if self.start == "popular" and (self.pool or self.cache == "none"):
            raise ChoiceError("start: 'popular' fills slots by layer of an LRU; leave 'pool' and 'cache'")

    @property
    def needs(self) -> Needs:
        return Needs(gpu_only=True, calibration=self.start == "popular")

    def compose(self, context: BuildContext) -> Composition:
        """LoadAll on an LRU that starts empty, or on none, or on one that starts full."""
        return Composition(
            placement=self._placement(),
            assigner=LoadAll(),
            cache=LruCache() if self.cache == "lru" else StaticCache(),
            demand_slots=self.demand_slots,
        )

    def _placement(self) -> Placement:
        if self.start == "popular":
            return PopularityPlacement(uniform=True)
        return PoolPlacement() if self.pool else NoPlacement()


def whole_layers(assigner: Assigner | None = None, demand_slots: int = 0) -> Composition:
    """Whole layers on the GPU, from the last one backwards. Without an ``assigner`` nothing is ever copied, and there
    is no staging. Systems that do the same in decode are charged the same decision cost."""
    return Composition(
        placement=LayerWisePlacement(),
        assigner=assigner or ResidentOrCpu(),
        cache=StaticCache(),
        demand_slots=demand_slots,
        decision_cost="layer-wise",
    )


def streamed_layers(
    context: BuildContext, placement: Placement, demand_slots: int, prefetch_slots: int | None, ahead: bool = True
) -> Composition:
    """All experts of a layer that are not resident are streamed through the GPU, used or not, and kept by nothing;
    ``ahead``: while the layer before is computed. ``prefetch_slots`` None: one for each expert of a layer."""
    slots = context.experts if prefetch_slots is None else prefetch_slots
    return Composition(
        placement=placement,
        assigner=StreamLayer(context.experts),
        prefetcher=NextLayer(context.layers, context.experts) if ahead else None,
        cache=StaticCache(),
        demand_slots=demand_slots,
        prefetch_slots=slots if ahead else 0,
        parameters={"prefetch_slots": slots},
    )


@register(
    "layer-wise",
    "whole layers on the GPU, the last ones; nothing moves",
    source="llama.cpp --n-cpu-moe; DALI, Section 6.1 (baseline)",
)
@dataclass(frozen=True)
class LayerWise(Policy):
    """No parameters: the cache budget decides how many layers there are on the GPU."""

    def compose(self, context: BuildContext) -> Composition:
        return whole_layers()


@register(
    "naive-cpu",
    "all experts on the CPU, whatever GPU memory there is",
    source="DALI, Fig. 14 and 19 (\"Naive\"; that of Fig. 16a is DALI's greedy assignment alone)",
)
@dataclass(frozen=True)
class NaiveCpu(Policy):
    """No parameters."""

    def compose(self, context: BuildContext) -> Composition:
        """No residents and no loads, so that the CPU computes everything."""
        return Composition(placement=NoPlacement(), assigner=ResidentOrCpu(), cache=StaticCache(), demand_slots=0)
