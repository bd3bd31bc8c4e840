"""Fiddler (Kamahori et al.): popular experts stay on the GPU; a missing one runs where it is done sooner."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from policies.parts.assigners import CostRule, ThresholdAssigner
from policies.parts.caches import StaticCache
from policies.parts.placements import PopularityPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Assigner, Composition, Needs
from policies.system import BuildContext, System, at_least

NEEDS = Needs(calibration=True)
CPU_MS_PER_TOKEN, GPU_MS = 7, 70  # of the released code, typed in (mixtral.py, L38-39)


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


@dataclass(frozen=True)
class FiddlerImplParameters:
    """Fiddler as released. The code keeps the placement of least *sum* of costs, which is the cheaper device of each
    expert, although its comment promises the least maximum. A missing expert is copied into the one placeholder, while
    nothing else happens, computed, and not kept: one staging slot.

    costs: "constants" compares the code's 7 ms a token on the CPU with its 70 ms flat on the GPU, so that a missing
        expert is loaded from 10 tokens on, on any machine; "planner" the planner's costs, as if somebody had measured.

    Not expressed: the code runs the GPU's experts, then the CPU's, in one thread. Here the lanes overlap, which makes a
    layer shorter by up to the shorter share.
    """

    costs: Literal["constants", "planner"] = "constants"


def build(parameters: FiddlerParameters, context: BuildContext) -> Composition:
    """Static residents; loads are never kept."""
    return _composition("fiddler", parameters.uniform, CostRule(), parameters.demand_slots, parameters)


def build_impl(parameters: FiddlerImplParameters, context: BuildContext) -> Composition:
    """The same by popularity alone, and one placeholder."""
    on_cpu = (GPU_MS - 1) // CPU_MS_PER_TOKEN  # the most tokens that cost less there
    assigner = CostRule() if parameters.costs == "planner" else ThresholdAssigner(on_cpu)
    return _composition("fiddler@impl", False, assigner, 1, parameters)


def _composition(
    name: str, uniform: bool, assigner: Assigner, demand_slots: int,
    parameters: FiddlerParameters | FiddlerImplParameters,
) -> Composition:  # fmt: skip
    return Composition(
        name=name,
        placement=PopularityPlacement(uniform),
        router=TrueRouter(),
        assigner=assigner,
        prefetcher=None,
        cache=StaticCache(),
        needs=NEEDS,
        demand_slots=demand_slots,
        parameters=asdict(parameters),
    )


FIDDLER = System(
    name="fiddler",
    summary="popular experts stay; copies where they beat the CPU",
    source="Fiddler, Sections 3.2-3.3",
    parameters=FiddlerParameters,
    build=build,
    needs=NEEDS,
)
FIDDLER_IMPL = System(
    name="fiddler@impl",
    summary="typed-in costs; blocking copies into one placeholder",
    source="efeslab/fiddler, src/fiddler/mixtral.py L38-39, L531, L567-611",
    parameters=FiddlerImplParameters,
    build=build_impl,
    needs=NEEDS,
)
