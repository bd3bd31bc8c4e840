"""Layer-wise offloading: whole layers' experts on the GPU, the others' on the CPU. Several systems do it, and differ in
prefill at most."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from policies.parts.assigners import ResidentOrCpu
from policies.parts.caches import StaticCache
from policies.parts.placements import LayerWisePlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Assigner, Composition
from policies.system import BuildContext, System


@dataclass(frozen=True)
class LayerWiseParameters:
    """No parameters: the cache budget decides how many layers there are on the GPU."""


def whole_layers(name: str, parameters: Any, assigner: Assigner | None = None, demand_slots: int = 0) -> Composition:
    """Whole layers, from the last one backwards. Without an ``assigner`` of its own nothing ever moves, and there is no
    staging. Whoever does the same in decode is charged the same for deciding it."""
    return Composition(
        name=name,
        placement=LayerWisePlacement(),
        router=TrueRouter(),
        assigner=assigner or ResidentOrCpu(),
        prefetcher=None,
        cache=StaticCache(),
        demand_slots=demand_slots,
        decision_cost="layer-wise",
        parameters=asdict(parameters),
    )


def build(parameters: LayerWiseParameters, context: BuildContext) -> Composition:
    """Prefill and decode alike."""
    return whole_layers("layer-wise", parameters)


LAYER_WISE = System(
    name="layer-wise",
    summary="whole layers on the GPU, the last ones; nothing moves",
    source="llama.cpp --n-cpu-moe; DALI, Section 6.1 (baseline)",
    parameters=LayerWiseParameters,
    build=build,
)
