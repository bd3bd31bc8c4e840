"""Layer-wise offloading, as llama.cpp does it: whole layers' experts on the GPU, the others' on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

from policies.assigners import ResidentOrCpu
from policies.caches import StaticCache
from policies.placements import LayerWisePlacement
from policies.protocols import Composition
from policies.routers import TrueRouter
from policies.system import BuildContext, System


@dataclass(frozen=True)
class LayerWiseParameters:
    """None: the cache budget decides how many layers there are on the GPU."""


def build(parameters: LayerWiseParameters, context: BuildContext) -> Composition:
    """Nothing ever moves, so there is no staging."""
    return Composition(
        name="layer-wise",
        placement=LayerWisePlacement(),
        router=TrueRouter(),
        assigner=ResidentOrCpu(),
        prefetcher=None,
        cache=StaticCache(),
        demand_slots=0,
    )


LAYER_WISE = System(
    name="layer-wise",
    summary="whole layers on the GPU from the last backwards, the experts of the others on the CPU; nothing moves",
    source="llama.cpp --n-cpu-moe; DALI, Section 6.1 (baseline)",
    parameters=LayerWiseParameters,
    build=build,
)
