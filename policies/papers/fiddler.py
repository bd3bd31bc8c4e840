"""Fiddler (Kamahori et al.): popular experts stay on the GPU; a missing one runs where it is finished sooner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policies.parts.assigners import CostRule, ThresholdAssigner
from policies.parts.caches import StaticCache
from policies.parts.placements import PopularityPlacement
from policies.protocols import Composition, Needs
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count

CPU_MS_PER_TOKEN, GPU_MS = 7, 70  # constants of the released code (mixtral.py, L38-39)


@register("fiddler", "popular experts stay; copies where they beat the CPU", source="Fiddler, Sections 3.2-3.3")
@dataclass(frozen=True)
class Fiddler(Policy):
    """Fiddler has one machine-dependent number, the break-even workload, which follows from the planner's costs.

    uniform: the same number of experts in every layer, instead of the most popular of the whole model (Section 3.2).
    demand_slots: staging slots for loads; the released code has one placeholder, 2 let copies overlap (ours).
    """

    needs = Needs(calibration=True)

    uniform: bool = False
    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        return Composition(
            placement=PopularityPlacement(self.uniform),
            assigner=CostRule(),
            cache=StaticCache(),
            demand_slots=self.demand_slots,
        )


@register(
    "fiddler@impl",
    "typed-in costs; blocking copies into one placeholder",
    source="efeslab/fiddler, src/fiddler/mixtral.py L38-39, L531, L567-611",
)
@dataclass(frozen=True)
class FiddlerImpl(Policy):
    """Fiddler as released. The code keeps the placement of least *sum* of costs, which is the cheaper device of each
    expert, although its comment promises the least maximum. A missing expert is copied into the one placeholder, while
    nothing else happens, computed, and not kept: one staging slot.

    costs: "constants" compares the code's 7 ms a token on the CPU with its 70 ms flat on the GPU, so that a missing
        expert is loaded from 10 tokens on, on any machine; "planner" the planner's costs, as if they had been measured.

    The code runs the GPU's experts, then the CPU's, in one thread. That is a trait of the engine ``fiddler-2024``; with
    others the lanes overlap, which makes a layer shorter by up to the shorter share.
    """

    needs = Needs(calibration=True)

    costs: Literal["constants", "planner"] = "constants"

    def compose(self, context: BuildContext) -> Composition:
        """Compose by popularity alone, with one placeholder."""
        most_on_cpu = (GPU_MS - 1) // CPU_MS_PER_TOKEN  # tokens that cost less there
        return Composition(
            placement=PopularityPlacement(),
            assigner=CostRule() if self.costs == "planner" else ThresholdAssigner(most_on_cpu),
            cache=StaticCache(),
            demand_slots=1,
        )
