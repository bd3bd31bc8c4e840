"""On-demand offloading: every expert runs on the GPU, those that miss are copied after routing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from policies.parts.assigners import LoadAll
from policies.parts.caches import StaticCache
from policies.parts.lru import LruCache
from policies.parts.placements import NoPlacement, PoolPlacement, PopularityPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Composition, Needs, Placement
from policies.system import BuildContext, ChoiceError, System, at_least

NEEDS = Needs(gpu_only=True)


@dataclass(frozen=True)
class OnDemandParameters:
    """The least that offloading can do. The default, an LRU by layer that starts empty and so fills itself at the
    expense of the first token, is ours. Two papers have a baseline of this kind, and neither is the default:

    "On-demand" of Speculating Experts (Section 5) is ``cache="none"``. Loads pass through staging, and the budget's
    cache slots stay empty; ``demand_slots=1`` copies the next expert only when the last one has been computed, which is
    that paper's sum of copies and computation. "MoE-OnDemand" of DAOP is ``start="popular"``, with the calibrated
    dominant experts on the GPU; it does not say who leaves, here it is the least recently used.

    pool: one LRU over all layers instead of one a layer (Mixtral-Offloading caches by layer).
    demand_slots: staging slots for loads that are not admitted; 2 let one copy run while another is computed (ours).
    cache: "lru" keeps what was loaded; "none" keeps nothing.
    start: "empty", or each layer's most "popular" experts on calibration prompts, divided as DAOP does (Section IV-A).
    """

    pool: bool = False
    demand_slots: int = 2
    cache: Literal["lru", "none"] = "lru"
    start: Literal["empty", "popular"] = "empty"

    def __post_init__(self) -> None:
        """Refuse a machine on which nothing could run, and residents that nothing describes."""
        at_least(self, demand_slots=1)
        if self.start == "popular" and (self.pool or self.cache == "none"):
            raise ChoiceError("parameter 'start': 'popular' fills slots by layer of an LRU; leave 'pool' and 'cache'")


def build(parameters: OnDemandParameters, context: BuildContext) -> Composition:
    """LoadAll on an LRU that starts empty, or on none, or on one that starts full."""
    return Composition(
        name="on-demand",
        placement=_placement(parameters),
        router=TrueRouter(),
        assigner=LoadAll(),
        prefetcher=None,
        cache=LruCache() if parameters.cache == "lru" else StaticCache(),
        needs=Needs(gpu_only=True, calibration=parameters.start == "popular"),
        demand_slots=parameters.demand_slots,
        parameters=asdict(parameters),
    )


def _placement(parameters: OnDemandParameters) -> Placement:
    if parameters.start == "popular":
        return PopularityPlacement(uniform=True)
    return PoolPlacement() if parameters.pool else NoPlacement()


ON_DEMAND = System(
    name="on-demand",
    summary="experts are copied when they are routed to; LRU cache",
    source="Speculating Experts, Section 5 (baseline); DAOP, MoE-OnDemand; LRU after Mixtral-Offloading",
    parameters=OnDemandParameters,
    build=build,
    needs=NEEDS,
)
