"""KTransformers' expert deferral: the lowest-weight experts that the CPU computes join the output of the next layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.mechanism.views import Assignment, ExpertCosts, LayerView
from policies.papers.ktransformers import KTransformers
from policies.parts.assigners import ByPhase, ResidentOrCpu
from policies.protocols import Assigner, Composition, Needs
from policies.system import BuildContext, NonNegative, register
from trilane.common.hints import Count


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
        """How many of a token's ``chosen`` experts the layer waits for."""
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
