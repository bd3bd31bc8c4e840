"""On-demand offloading: every expert runs on the GPU, those that miss are copied after routing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from policies.assigners import LoadAll
from policies.lru import LruCache
from policies.placements import NoPlacement, PoolPlacement
from policies.protocols import Composition, Needs
from policies.routers import TrueRouter
from policies.system import BuildContext, System, at_least

NEEDS = Needs(gpu_only=True)


@dataclass(frozen=True)
class OnDemandParameters:
    """The least that offloading can do.

    pool: one LRU over all layers instead of one a layer (Mixtral-Offloading caches by layer).
    demand_slots: staging slots for loads that are not admitted; 2 let one copy run while another is computed (ours).
    """

    pool: bool = False
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Refuse a machine on which nothing could run."""
        at_least(self, demand_slots=1)


def build(parameters: OnDemandParameters, context: BuildContext) -> Composition:
    """LoadAll on an LRU that starts empty."""
    return Composition(
        name="on-demand",
        placement=PoolPlacement() if parameters.pool else NoPlacement(),
        router=TrueRouter(),
        assigner=LoadAll(),
        prefetcher=None,
        cache=LruCache(),
        needs=NEEDS,
        demand_slots=parameters.demand_slots,
        parameters=asdict(parameters),
    )


ON_DEMAND = System(
    name="on-demand",
    summary="GPU only: absent experts are copied when the router has chosen them; LRU cache",
    source="Speculating Experts, Section 5 (baseline); LRU after Mixtral-Offloading",
    parameters=OnDemandParameters,
    build=build,
    needs=NEEDS,
)
