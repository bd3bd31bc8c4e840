"""KTransformers, in two readings: expert by expert (HybriMoE; what the released code does today) and layer by layer
(DALI). The shared experts are on the GPU in both, as they are for every policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policies.baselines.whole_layers import whole_layers
from policies.parts.assigners import ByPhase, LoadAll, ResidentOrCpu
from policies.parts.caches import StaticCache
from policies.parts.placements import PopularityPlacement, RandomPlacement, even_slots
from policies.protocols import Assigner, Budget, Composition, InitialPlacement, Needs, Placement
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count

Prefill = Literal["gpu", "cpu"]
Strategy = Literal["frequency", "uniform", "front-loading", "random"]

RANDOM_SEED = 42  # the code's


class InOrderPlacement:
    """By layer and id, without statistics. ``even``: the lowest ids of every layer; else from the first layer on."""

    def __init__(self, even: bool) -> None:
        self.even = even

    def place(self, budget: Budget) -> InitialPlacement:
        """Fill the memory in order."""
        slots = even_slots(budget) if self.even else _from_the_first(budget)
        return InitialPlacement(tuple(slots), tuple(tuple(range(count)) for count in slots))


def _from_the_first(budget: Budget) -> list[int]:
    slots, left = [], budget.cache_bytes
    for size in budget.expert_bytes:
        slots.append(min(left // size, budget.experts))
        left -= slots[-1] * size
    return slots


def _prefill_on(device: Prefill, slots: int = 2) -> tuple[Assigner, int]:
    """The assigner, and its number of staging slots."""
    return (ByPhase(LoadAll(), ResidentOrCpu()), slots) if device == "gpu" else (ResidentOrCpu(), 0)


@register(
    "ktransformers",
    "popular experts stay; others: CPU, copied in prefill",
    source="HybriMoE, Table I and Section VI-A; KTransformers, kt-kernel/python/experts_base.py",
)
@dataclass(frozen=True)
class KTransformers(Policy):
    """The expert-wise reading.

    prefill: where the experts that are not resident run in prefill. HybriMoE's Table I has KTransformers compute on the
        CPU in decode only, and its code, a fork, puts all experts of a prefill on the GPU: "gpu" copies them there and
        does not keep them. "cpu" as in decode.
    strategy: which experts are resident, as in the released code. "frequency": the most activated of the whole model
        (HybriMoE, Section VI-A); "uniform": as many in every layer, lowest ids first (the code's default, which needs
        no statistics); "front-loading": from the first layer on; "random": even slots, seed 42.
    demand_slots: staging slots for the copies of a prefill (ours); HybriMoE's code has one for each expert of a layer.
    """

    prefill: Prefill = "gpu"
    strategy: Strategy = "frequency"
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        """Calibration counts frequencies."""
        return Needs(calibration=self.strategy == "frequency")

    def compose(self, context: BuildContext) -> Composition:
        """Static residents; in decode the CPU computes the rest in parallel with the GPU."""
        strategies: dict[Strategy, Placement] = {
            "frequency": PopularityPlacement(),
            "uniform": InOrderPlacement(even=True),
            "front-loading": InOrderPlacement(even=False),
            "random": RandomPlacement(RANDOM_SEED),
        }
        assigner, slots = _prefill_on(self.prefill, self.demand_slots)
        return Composition(
            placement=strategies[self.strategy], assigner=assigner, cache=StaticCache(), demand_slots=slots
        )


@register(
    "ktransformers@layer-wise",
    "whole layers on the GPU, as DALI ran KTransformers",
    source="DALI, Sections 1 and 6.1",
)
@dataclass(frozen=True)
class KTransformersLayerWise(Policy):
    """DALI's reading.

    prefill: DALI blames KTransformers' slow prefill on the CPU's share of it (Section 6.2, Fig. 13), hence "cpu"; "gpu"
        copies the experts of CPU layers, and does not keep them.
    """

    prefill: Prefill = "cpu"

    def compose(self, context: BuildContext) -> Composition:
        """Whole layers, from the last one backwards."""
        return whole_layers(*_prefill_on(self.prefill))
