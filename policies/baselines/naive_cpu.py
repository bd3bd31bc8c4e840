"""The naive baseline: every expert on the CPU, and nothing of the GPU memory used for experts."""

from __future__ import annotations

from dataclasses import dataclass

from policies.parts.assigners import ResidentOrCpu
from policies.parts.caches import StaticCache
from policies.parts.placements import NoPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Composition
from policies.system import BuildContext, System


@dataclass(frozen=True)
class NaiveCpuParameters:
    """No parameters."""


def build(parameters: NaiveCpuParameters, context: BuildContext) -> Composition:
    """Nobody is placed and nothing is loaded, so the CPU has it all."""
    return Composition(
        name="naive-cpu",
        placement=NoPlacement(),
        router=TrueRouter(),
        assigner=ResidentOrCpu(),
        prefetcher=None,
        cache=StaticCache(),
        demand_slots=0,
    )


NAIVE_CPU = System(
    name="naive-cpu",
    summary="all experts on the CPU, whatever GPU memory there is",
    source="DALI, Fig. 14 and 19 (\"Naive\"; that of Fig. 16a is DALI's greedy assignment alone)",
    parameters=NaiveCpuParameters,
    build=build,
)
