"""Fiddler (Kamahori et al.): popular experts stay on the GPU; a missing one runs where it is done sooner."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from policies.assigners import CostRule
from policies.caches import StaticCache
from policies.placements import PopularityPlacement
from policies.protocols import Composition, Needs
from policies.routers import TrueRouter
from policies.system import BuildContext, System, at_least

NEEDS = Needs(calibration=True)


@dataclass(frozen=True)
class FiddlerParameters:
    """Fiddler has one machine-dependent number, the break-even workload, which follows from the planner's costs.

    uniform: the same number of experts in every layer, instead of the most popular of the whole model (Section 3.2).
    demand_slots: staging slots for loads; the released code has one placeholder, 2 let copies overlap (ours).
    """

    uniform: bool = False
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Loads pass through staging."""
        at_least(self, demand_slots=1)


def build(parameters: FiddlerParameters, context: BuildContext) -> Composition:
    """Static residents; loads are never kept."""
    return Composition(
        name="fiddler",
        placement=PopularityPlacement(parameters.uniform),
        router=TrueRouter(),
        assigner=CostRule(),
        prefetcher=None,
        cache=StaticCache(),
        needs=NEEDS,
        demand_slots=parameters.demand_slots,
        parameters=asdict(parameters),
    )


FIDDLER = System(
    name="fiddler",
    summary="popular experts resident; a missing one is loaded iff copy + GPU beats the CPU, and not kept",
    source="Fiddler, Sections 3.2-3.3",
    parameters=FiddlerParameters,
    build=build,
    needs=NEEDS,
)
