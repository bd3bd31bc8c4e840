"""DAOP: experts swapped for the prompt, and the next layer predicted, with its CPU experts computed ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertId, LayerView, Routing, Swap
from policies.parts.assigners import ByPhase, ResidentOrCpu, settle, sooner_on_gpu
from policies.parts.caches import StaticCache
from policies.parts.placements import PopularityPlacement
from policies.parts.routers import ForecastRouter
from policies.protocols import Assigner, Composition, Needs, When
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count, Share, at_least

SwapRule = Literal["guarded", "printed", "coded"]
NEEDS = Needs(
    tokens=True, forecasts=(("gate", 1),), forecast_phases=("decode",), calibration=True, changes_routing=True
)


class PromptSwapCache(StaticCache):
    """Section IV-B, Algorithm 1: when a prompt has been routed, the ``most`` busiest experts on the CPU change places
    with the idlest on the GPU, pair by pair, as far as ``rule`` allows. In decode nothing is swapped.

    n are the tokens of the step: a prompt in chunks swaps chunk by chunk (ours). Ties go to the lower id. The rules:
    "printed", n[hot] >= ``threshold`` n[cold], allows two unused experts too; "guarded" (ours) also requires
    n[hot] > n[cold]; "coded" is n[hot] > ``threshold`` n[cold]. ``retry`` requests again, when the layer ends, swaps
    that were dropped because the layer loaded the expert itself: while it is still in its staging slot, the two
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
        self._members: set[ExpertId] = set()  # including those in flight
        self.requested: Sequence[Swap] = ()  # for the prompt's layer at work

    def admitted(self, key: ExpertId, group: int) -> None:
        self._members.add(key)

    def evicted(self, key: ExpertId, group: int) -> None:
        self._members.remove(key)

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        """Swaps as soon as a prompt is routed; at the end of the layer those that have not begun, with ``retry``."""
        if view.phase != "prefill" or when == "step_end":
            return ()
        if when == "routed":
            self.requested = self._swaps_for(view)
            return self.requested
        resident = view.residency.resident[view.layer]
        open_ones = [s for s in self.requested if s.incoming not in self._members and s.outgoing.expert in resident]
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
    """Fiddler's rule once a prompt's swaps are made: incoming experts run on the GPU, and their copy is charged
    nowhere. ``cpu_tokens``: absent experts of up to so many tokens run on the CPU; None: where they end sooner.

    They are loaded last. So they are still in their staging slots when the layer ends, if there are as many slots as
    ``cache`` has swaps, and its ``retry`` needs no second copy.
    """

    def __init__(self, cache: PromptSwapCache, cpu_tokens: int | None = None) -> None:
        self.cache = cache
        self.cpu_tokens = cpu_tokens

    def assign(self, view: LayerView) -> Assignment:
        """Experts that are swapped in, or cheaper there, go to the GPU."""
        incoming = {swap.incoming.expert for swap in self.cache.requested}
        sooner = zip(view.routing.active, self._cheaper(view), strict=True)
        plan = settle(view, [gpu or expert in incoming for expert, gpu in sooner])
        loads = tuple(sorted(plan.loads, key=incoming.__contains__))
        return plan._replace(gpu=plan.gpu[: len(plan.gpu) - len(loads)] + loads, loads=loads)

    def _cheaper(self, view: LayerView) -> list[bool]:
        """For every active expert, True if it would be cheaper on the GPU."""
        if (most := self.cpu_tokens) is None:
            return sooner_on_gpu(view)
        active = zip(view.routing.active, view.routing.tokens, strict=True)
        return [tokens > most or view.ready_ns[expert] != INFINITE_NS for expert, tokens in active]


class PredictingRouter(ForecastRouter):
    """Section IV-C: in decode, the next layer's routing is its gate's output for this layer's activations, and is never
    corrected; its experts on the CPU are computed ahead, on this layer's activations.

    Graceful degradation: of a token's predicted experts on the CPU the best-scored stays; the others, the lowest-scored
    first, are replaced by the best-scored experts on the GPU that are not predicted. Those that a forecast names come
    first, by its scores; a recorded one names 2k, and the others follow by ``popularity`` (of each layer, the most
    popular first; None: not at all), with the least score that is known (ours). The paper has one token and two
    experts; more are treated alike, token by token, and what any token leaves to the CPU is computed ahead once (ours).
    An expert in flight counts as on the CPU.

    Weights are those of a ForecastRouter; renormalised, they are the softmax of the predicted logits of the final
    selection (our reading). ``degrade`` False keeps the prediction. The layers that have a forecast are predicted
    (``Needs.forecast_layers``).
    """

    def __init__(
        self, degrade: bool = True, norm_topk: bool = True, popularity: Sequence[Sequence[int]] | None = None
    ) -> None:
        super().__init__(norm_topk)
        self.degrade = degrade
        self.popularity = popularity

    def ahead(self, routing: Routing, view: LayerView) -> tuple[int, ...]:
        """The experts that are on the CPU, the busiest first."""
        workload, resident = routing.workload(), view.residency.resident[view.layer + 1]
        on_cpu = [expert for expert in routing.active if expert not in resident]
        return tuple(sorted(on_cpu, key=workload.__getitem__, reverse=True))

    def select(self, ranked: Sequence[int], view: LayerView) -> Sequence[int]:
        """The prediction, degraded where that is allowed."""
        k, resident = len(view.routing.token_ids[0]), view.residency.resident[view.layer + 1]
        chosen = ranked[:k]
        leaving = [expert for expert in chosen if expert not in resident][1:]
        if not leaving or not self.degrade:
            return chosen
        others = self.popularity[view.layer + 1] if self.popularity else ()
        unnamed = [expert for expert in others if expert not in ranked]
        spare = [expert for expert in (*ranked[k:], *unnamed) if expert in resident][: len(leaving)]
        gone = leaving[len(leaving) - len(spare) :]
        return [expert for expert in chosen if expert not in gone] + spare


@register("daop", "swaps once, for the prompt; computes ahead on the CPU", source="DAOP, Section IV")
@dataclass(frozen=True)
class Daop(Policy):
    """Parameters of DAOP. The paper has one sequence at a time; a batch swaps by all its tokens and is predicted token
    by token.

    first_predicted_block: the first MoE layer, counted from 1, whose routing is predicted. The paper predicts "when
        i >= 4" and uses the own gate "for 0 < i < 4", which leaves block 4 open: here blocks 1 to 4 use their own gate.
    swap_share: swaps of a layer, at most, as a share of its experts (Algorithm 1, line 5).
    threshold: SwapInOut, how much busier the incoming expert must be (Section IV-B).
    swap_rule: "printed" is line 10 literally, which n[hot] = n[cold] = 0 satisfies, so that unused experts move;
        "guarded" (ours) keeps those where they are.
    degrade: graceful degradation (Section IV-C).
    """

    needs = NEEDS

    first_predicted_block: Annotated[int, at_least(2)] = 5
    swap_share: Share = 0.5
    threshold: Annotated[float, at_least(1)] = 1.05
    swap_rule: Literal["guarded", "printed"] = "guarded"
    degrade: bool = True

    def compose(self, context: BuildContext) -> Composition:
        """DAOP as in Section IV: every expert runs where it is (Algorithm 1, line 14; Section IV-C), one that is being
        swapped in on the CPU until it has arrived (our reading). Nothing is ever loaded, so there is no staging."""
        most = int(self.swap_share * context.experts)
        cache = PromptSwapCache(context.experts, most, self.threshold, self.swap_rule)
        return _composition(self, context, cache, ResidentOrCpu(awaits=False), 0)


@register(
    "daop@impl",
    "Fiddler's rule in prefill; predicts a layer later",
    source="ecolab-nus/DAOP 08fef33, model/modeling_daop.py",
)
@dataclass(frozen=True)
class DaopImpl(Policy):
    """Parameters of the released code (ecolab-nus/DAOP 08fef33, model/modeling_daop.py).

    first_predicted_block: the code predicts from its layer 5 on, counted from 0 (L340-349).
    most_swaps: ``largest_num`` swaps a layer (L393-408).
    threshold: as in the paper, but the busier one must exceed it.
    degrade: if both are predicted on the CPU, the second gives way to the highest-scored resident (L595-665).
    cpu_tokens: experts of up to so many tokens of a prompt stay on the CPU. None: those that the planner's costs leave
        there. The code has constants typed in (data/calibration_data.py): on an A6000 8.5 ms a token against 210 ms a
        load for Mixtral, 24 tokens; 3.5 against 30 for Phi-3.5, 8 tokens.
    demand_slots: staging slots for the loads of a prefill. None: as many as a layer may swap, at least one, so that an
        expert that is swapped in is copied once. The code has one placeholder for loads that it does not keep.

    Not modelled: the code swaps before anything of the layer runs, one blocking copy after another; here the experts
    that are swapped in are loaded while others are computed, and take their cache slots when the layer ends, since a
    slot is not emptied while the layer uses its expert. Where layers have experts of different size, a smaller one that
    is swapped in is copied twice, because its cache slot is no staging slot.
    """

    needs = NEEDS

    first_predicted_block: Annotated[int, at_least(2)] = 6
    most_swaps: NonNegative = 8
    threshold: Annotated[float, at_least(1)] = 1.05
    degrade: bool = True
    cpu_tokens: Count | None = None
    demand_slots: Count | None = None

    def compose(self, context: BuildContext) -> Composition:
        """DAOP as coded: for a prompt Fiddler's rule once the swaps are made, where the least sum of costs is each
        expert's cheaper device; in decode residence alone."""
        cache = PromptSwapCache(context.experts, self.most_swaps, self.threshold, "coded", retry=True)
        assigner = ByPhase(prefill=AfterSwaps(cache, self.cpu_tokens), decode=ResidentOrCpu(awaits=False))
        slots = self.demand_slots or max(1, min(self.most_swaps, context.experts // 2))
        return replace(_composition(self, context, cache, assigner, slots), parameters={"demand_slots": slots})


def _composition(
    policy: Daop | DaopImpl, context: BuildContext, cache: PromptSwapCache, assigner: Assigner, demand_slots: int
) -> Composition:
    predicted = frozenset(range(policy.first_predicted_block - 1, context.layers))
    popularity = context.required_calibration().decode_popularity
    ranked = np.argsort(-popularity, axis=1, kind="stable").tolist()
    return Composition(
        placement=PopularityPlacement(uniform=True, popularity=popularity),
        router=PredictingRouter(policy.degrade, context.norm_topk, ranked),
        assigner=assigner,
        cache=cache,
        needs=replace(NEEDS, forecast_layers={"gate": predicted}),
        demand_slots=demand_slots,
    )
