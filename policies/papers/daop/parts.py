"""DAOP's parts: experts swapped for the prompt, where they run in the released code, and the next layer predicted, with
its CPU experts computed ahead (Sections IV-B and IV-C)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.mechanism.views import Assignment, ExpertId, LayerView, Routing, Swap
from policies.parts.assigners import settle, sooner_on_gpu
from policies.parts.caches import StaticCache
from policies.parts.routers import ForecastRouter
from policies.protocols import When

SwapRule = Literal["guarded", "printed", "coded"]


class PromptSwapCache(StaticCache):
    """Algorithm 1: when a prompt has been routed, the ``most`` busiest experts on the CPU change places with the idlest
    on the GPU, pair by pair, as far as ``rule`` says. In decode nobody is asked to move.

    n are the tokens of the step: a prompt in chunks swaps chunk by chunk (ours). Ties go to the lower id. The rules:
    "printed", n[hot] >= ``threshold`` n[cold], passes two unused experts too; "guarded" (ours) also asks that
    n[hot] > n[cold]; "coded" is n[hot] > ``threshold`` n[cold]. ``retry`` asks again, when the layer ends, for swaps
    that were dropped because the layer loaded the expert itself: where it still lies in its staging slot, the two
    exchange their slots, and nothing is copied again.
    """

    def __init__(
        self, experts: int, most: int, threshold: float = 1.05, rule: SwapRule = "guarded", retry: bool = False
    ) -> None:
        self.experts = experts
        self.most = most
        self.threshold = threshold
        self.rule = rule
        self.retry = retry
        self._members: set[ExpertId] = set()  # those on their way included
        self.asked: Sequence[Swap] = ()  # for the prompt's layer at work

    def admitted(self, id: ExpertId, group: int) -> None:
        """The expert has, or is promised, a slot."""
        self._members.add(id)

    def evicted(self, id: ExpertId, group: int) -> None:
        """The expert's slot is gone."""
        self._members.remove(id)

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        """As soon as a prompt is routed; at the end of the layer what has not begun, if that is to be asked again."""
        if view.phase != "prefill" or when == "step_end":
            return ()
        if when == "routed":
            self.asked = self._swaps_for(view)
            return self.asked
        resident = view.residency.resident[view.layer]
        open_ones = [s for s in self.asked if s.incoming not in self._members and s.outgoing.expert in resident]
        return open_ones if self.retry else ()

    def _swaps_for(self, view: LayerView) -> list[Swap]:
        layer, tokens = view.layer, view.routing.workload()
        absent = [e for e in range(self.experts) if (layer, e) not in self._members]
        hot = sorted(absent, key=lambda e: tokens.get(e, 0), reverse=True)[: self.most]
        cold = sorted(sorted(view.residency.resident[layer]), key=lambda e: tokens.get(e, 0))[: self.most]
        return [
            Swap(ExpertId(layer, new), ExpertId(layer, old))
            for new, old in zip(hot, cold, strict=False)
            if self._worth(tokens.get(new, 0), tokens.get(old, 0))
        ]

    def _worth(self, hot: int, cold: int) -> bool:
        if self.rule == "coded":
            return hot > self.threshold * cold
        return hot >= self.threshold * cold and (hot > cold or self.rule == "printed")


class AfterSwaps:
    """Fiddler's rule once a prompt's swaps are made: who comes in runs on the GPU, and no rule charges its copy.

    These are loaded last. So they still lie in their staging slots when the layer ends, if there are as many as
    ``cache`` has swaps, and its ``retry`` needs no second copy.
    """

    def __init__(self, cache: PromptSwapCache) -> None:
        self.cache = cache

    def assign(self, view: LayerView) -> Assignment:
        """Who is swapped in goes to the GPU, who is cheaper there, too."""
        incoming = {swap.incoming.expert for swap in self.cache.asked}
        sooner = zip(view.routing.active, sooner_on_gpu(view), strict=True)
        plan = settle(view, [gpu or expert in incoming for expert, gpu in sooner])
        loads = tuple(sorted(plan.loads, key=incoming.__contains__))
        return plan._replace(gpu=plan.gpu[: len(plan.gpu) - len(loads)] + loads, loads=loads)


class PredictingRouter(ForecastRouter):
    """Section IV-C: in decode, the next layer's routing is what its gate says of this layer's activations, and is never
    corrected; its experts on the CPU are computed ahead, on this layer's activations.

    Graceful degradation: of a token's predicted experts on the CPU the best-scored stays; the others are replaced by
    the best-scored ones not predicted that are on the GPU, the lowest-scored first, as far as there are any among those
    that the forecast names. The paper has one token and two experts; more are treated alike, token by token, and what
    any token leaves to the CPU is computed ahead once (ours). An expert on its way to the GPU counts as on the CPU.

    Weights are those of a ForecastRouter; renormalised, they are the softmax of the predicted logits of the final
    selection (our reading). ``degrade`` False keeps the prediction. Which layers are predicted is a matter of which
    have a forecast (``Needs.forecast_layers``).
    """

    def __init__(self, degrade: bool = True, norm_topk: bool = True) -> None:
        super().__init__(norm_topk)
        self.degrade = degrade

    def ahead(self, routing: Routing, view: LayerView) -> tuple[int, ...]:
        """The experts that are on the CPU, the busiest first."""
        workload, resident = routing.workload(), view.residency.resident[view.layer + 1]
        on_cpu = [expert for expert in routing.active if expert not in resident]
        return tuple(sorted(on_cpu, key=workload.__getitem__, reverse=True))

    def select(self, ranked: Sequence[int], view: LayerView) -> Sequence[int]:
        """The prediction, degraded where it may be."""
        k, resident = len(view.routing.token_ids[0]), view.residency.resident[view.layer + 1]
        chosen = ranked[:k]
        leaving = [expert for expert in chosen if expert not in resident][1:]
        if not leaving or not self.degrade:
            return chosen
        spare = [expert for expert in ranked[k:] if expert in resident][: len(leaving)]
        gone = leaving[len(leaving) - len(spare) :]
        return [expert for expert in chosen if expert not in gone] + spare
