"""DAOP's three parts: experts swapped for the prompt, everything run where it lies, and the next layer predicted, with
its CPU experts computed ahead (Sections IV-B and IV-C)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal

from policies.assigners import settle
from policies.caches import StaticCache
from policies.protocols import When
from policies.token_routing import routing_of_tokens
from policies.views import Assignment, Commitment, ExpertId, Forecast, LayerView, Routing, Swap

SwapRule = Literal["guarded", "printed", "coded"]


class SequenceCache(StaticCache):
    """Algorithm 1: when a prompt has been routed, the ``most`` busiest experts on the CPU change places with the idlest
    on the GPU, pair by pair, as far as ``rule`` says. In decode nobody is asked to move.

    n are the tokens of the step: a prompt in chunks swaps chunk by chunk (ours). Ties go to the lower id. The rules:
    "printed", n[hot] >= ``threshold`` n[cold], passes two unused experts too; "guarded" (ours) also asks that
    n[hot] > n[cold]; "coded" is n[hot] > ``threshold`` n[cold]. ``retry`` asks again, when the layer ends, for swaps
    that were dropped because the layer loaded the expert itself.
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
        self._asked: Sequence[Swap] = ()  # of the layer at work

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
            self._asked = self._swaps_for(view)
            return self._asked
        resident = view.residency.resident[view.layer]
        open_ones = [s for s in self._asked if s.incoming not in self._members and s.outgoing.expert in resident]
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


class WhereItLies:
    """Residents on the GPU, the others on the CPU (Algorithm 1, line 14; Section IV-C). An expert that is being swapped
    in counts as resident once it has arrived (our reading)."""

    def assign(self, view: LayerView) -> Assignment:
        """Every expert where it is now."""
        return settle(view, [view.ready_ns[expert] == 0 for expert in view.routing.active])


class PredictingRouter:
    """Section IV-C: in decode, the next layer's routing is what its gate says of this layer's activations, and is never
    corrected; its experts on the CPU are computed ahead, on this layer's activations.

    Graceful degradation: of a token's predicted experts on the CPU the best-scored stays; the others are replaced by
    the best-scored ones not predicted that are on the GPU, the lowest-scored first, as far as there are any among those
    that the forecast names. The paper has one token and two experts; more are treated alike, token by token, and what
    any token leaves to the CPU is computed ahead once (ours). An expert on its way to the GPU counts as on the CPU.

    Weights are the forecast's scores over the final selection, renormalised (our reading: the softmax of the predicted
    logits of these experts); equal shares where the forecast has no scores. ``degrade`` False keeps the prediction.
    Which layers are predicted is a matter of which have a forecast (``Needs.forecast_layers``).
    """

    def __init__(self, degrade: bool = True) -> None:
        self.degrade = degrade

    def route(self, view: LayerView) -> Routing:
        """A layer without prediction is routed by its own gate."""
        return view.routing

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        """The next layer's routing and precomputations, if there is a forecast of it."""
        forecast = next((f for f in forecasts if f.layer == view.layer + 1), None)
        if forecast is None or view.phase != "decode":
            return None
        k, resident = len(view.routing.token_ids[0]), view.residency.resident[forecast.layer]
        ids = [self._select(ranked, k, resident) for ranked in forecast.token_ids]
        scores = forecast.token_scores or [()] * len(ids)
        weights = [_shares(*token) for token in zip(ids, forecast.token_ids, scores, strict=True)]
        routing = routing_of_tokens(ids, weights)
        workload = routing.workload()
        ahead = [expert for expert in routing.active if expert not in resident]
        return Commitment(routing, tuple(sorted(ahead, key=workload.__getitem__, reverse=True)))

    def _select(self, ranked: Sequence[int], k: int, resident: Container[int]) -> Sequence[int]:
        """One token's experts, best first, from all that the forecast names, best first."""
        chosen = ranked[:k]
        leaving = [expert for expert in chosen if expert not in resident][1:]
        if not leaving or not self.degrade:
            return chosen
        spare = [expert for expert in ranked[k:] if expert in resident][: len(leaving)]
        gone = leaving[len(leaving) - len(spare) :]
        return [expert for expert in chosen if expert not in gone] + spare


def _shares(ids: Sequence[int], ranked: Sequence[int], scores: Sequence[float]) -> Sequence[float]:
    """Weights of one token's experts that sum up to 1."""
    known = dict(zip(ranked, scores, strict=False))
    total = sum(known[expert] for expert in ids) if known else 0.0
    return [known[expert] / total for expert in ids] if total > 0 else [1 / len(ids)] * len(ids)
