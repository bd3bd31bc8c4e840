"""Static baselines that never copy an expert: whole layers on the GPU, and everything on the CPU; and whole layers that
are streamed."""

from __future__ import annotations

from dataclasses import dataclass

from policies.parts.assigners import ResidentOrCpu, StreamLayer
from policies.parts.caches import StaticCache
from policies.parts.placements import LayerWisePlacement, NoPlacement
from policies.parts.prefetchers import NextLayer
from policies.protocols import Assigner, Composition, Placement
from policies.system import BuildContext, Policy, register


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
