"""KTransformers, in two readings: expert by expert (HybriMoE; what the released code does today) and layer by layer
(DALI); and its expert deferral: the lowest-weight experts that the CPU computes join the output of the next layer. The
shared experts are on the GPU in all of them, as they are for every policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from policies.baselines.static import whole_layers
from policies.mechanism.views import Assignment, ExpertCosts, LayerView
from policies.parts.assigners import ByPhase, LoadAll, ResidentOrCpu
from policies.parts.caches import StaticCache
from policies.parts.placements import PopularityPlacement, RandomPlacement, even_slots
from policies.protocols import Assigner, Budget, Composition, InitialPlacement, Needs, Placement
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count

Prefill = Literal["gpu", "cpu"]
Strategy = Literal["frequency", "uniform", "front-loading", "random"]

RANDOM_SEED = 42  # the code's


class InOrderPlacement:
    """By layer and id, without statistics. ``even``: the lowest ids of every layer; else from the first layer on."""

    def __init__(self, even: bool) -> None:
        self.even = even

    def place(self, budget: Budget) -> InitialPlacement:
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
        return whole_layers(*_prefill_on(self.prefill))


class DeferLowest:
    """Another assigner's decision, with CPU experts deferred that are not among the first of any token by weight.

    ``deferred``: how many of a token's experts are not among the first. None: the fewest with which the CPU need not
    wait between two layers (``covering``), at most all but ``immediate``. The last layer defers none.
    """

    def __init__(self, assigner: Assigner, deferred: int | None = None, immediate: int = 2) -> None:
        self.assigner, self.deferred, self.immediate = assigner, deferred, immediate

    def assign(self, view: LayerView) -> Assignment:
        """The CPU's immediate experts first, then the deferred ones, each in the other assigner's order."""
        made = self.assigner.assign(view)
        if view.layer == len(view.costs) - 1 or not made.cpu:
            return made
        first = {expert for ids in view.routing.token_ids for expert in ids[: self._immediate(len(ids), view)]}
        deferred = tuple(expert for expert in made.cpu if expert not in first)
        return made._replace(cpu=tuple(e for e in made.cpu if e in first) + deferred, deferred=deferred)

    def _immediate(self, chosen: int, view: LayerView) -> int:
        """Number of a token's ``chosen`` experts that the layer waits for."""
        if self.deferred is not None:
            return max(0, chosen - self.deferred)
        least = min(self.immediate, max(1, chosen - 1))
        return max(least, chosen - covering(view.costs[view.layer]))


def covering(costs: ExpertCosts) -> int:
    """The fewest CPU experts of one token, one at least, that take as long as the CPU waits between two layers."""
    return max(1, -(-(costs.between_ns + costs.exchange_ns) // max(1, costs.cpu_ns[1])))


@register(
    "kt-deferral",
    "low-weight experts of the CPU join the next layer",
    source="KTransformers (SOSP 2025), Section 4; kvcache-ai/ktransformers, kt-kernel/python/experts_base.py",
)
@dataclass(frozen=True)
class KTransformersDeferral(KTransformers):
    """Expert deferral, in decode (Section 4); prompts, and which experts are resident, as ``ktransformers``.

    deferred: how many of a token's experts, those of the lowest weights, need not join their own layer
        (``--kt-max-deferred-experts-per-token``); 0 is ``ktransformers``. None: the fewest with which the CPU is always
        at work, by the planner's costs.
    immediate: where ``deferred`` is None, how many of a token's experts stay at least (the paper: 2); of two, one does.
    """

    deferred: NonNegative | None = None
    immediate: Count = 2

    @property
    def needs(self) -> Needs:
        """The order of each token's experts, where any are deferred."""
        defers = self.deferred != 0
        return replace(super().needs, tokens=defers, changes_routing=defers)

    def compose(self, context: BuildContext) -> Composition:
        """The composition of ``ktransformers``, with results that join later."""
        made = super().compose(context)
        if self.deferred == 0:
            return made
        decode = DeferLowest(ResidentOrCpu(), self.deferred, self.immediate)
        return replace(made, assigner=ByPhase(prefill=made.assigner, decode=decode))
