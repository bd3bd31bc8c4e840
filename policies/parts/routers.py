"""The model's own router, the base of routers that commit to a forecast, and the building of a routing token by token.

Routers that change what the model computes are defined with the paper that proposes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from policies.mechanism.views import Commitment, Forecast, LayerView, Routing
from policies.parts.prefetchers import next_forecast


class TrueRouter:
    """Runs what the model's own router chose, and commits nothing."""

    looks_ahead = False

    def route(self, view: LayerView) -> Routing:
        return view.routing

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        return None


class ForecastRouter(TrueRouter, ABC):
    """Base of routers that commit to a forecast: in decode it decides the next layer's routing, without that layer's
    own router.

    Weights are the forecast's scores over the experts that a token gets, normalised as the model does (``norm_topk``);
    equal shares where the forecast has no scores, and the least of them for an expert that it does not name. A layer
    without a forecast, and a prefill, use the layer's router.
    """

    looks_ahead = True

    def __init__(self, norm_topk: bool = True) -> None:
        self.norm_topk = norm_topk

    @abstractmethod
    def select(self, ranked: Sequence[int], view: LayerView) -> Sequence[int]:
        """One token's experts of the next layer, best first, by ``ranked``, all that the forecast names, best first."""

    def ahead(self, routing: Routing, view: LayerView) -> tuple[int, ...]:
        """Experts of the next layer that the CPU computes on this layer's activations: none."""
        return ()

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        """The next layer's routing, if there is a forecast of it."""
        forecast = next_forecast(view, forecasts)
        if forecast is None or view.phase != "decode":
            return None
        ids = [self.select(ranked, view) for ranked in forecast.token_ids]
        tokens = zip(scores_by_expert(forecast), ids, strict=True)
        weights = [combine_weights(_scores_of(chosen, scores), chosen, self.norm_topk) for scores, chosen in tokens]
        routing = routing_of_tokens(ids, weights)
        return Commitment(routing, self.ahead(routing, view))


def routing_of_tokens(ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> Routing:
    """The routing that sends each token to its ``ids``; both are [tokens][k], by descending weight."""
    workload: dict[int, int] = {}
    for chosen in ids:
        for expert in chosen:
            workload[expert] = workload.get(expert, 0) + 1
    active = tuple(sorted(workload))
    return Routing(active, tuple(workload[expert] for expert in active), ids, weights)


def scores_by_expert(forecast: Forecast) -> list[dict[int, float]]:
    """For each token, the scores of the experts that the forecast names; empty where it has no scores."""
    if not forecast.token_scores:
        return [{} for _ in forecast.token_ids]
    return [dict(zip(*token, strict=True)) for token in zip(forecast.token_ids, forecast.token_scores, strict=True)]


def _scores_of(ids: Sequence[int], scores: Mapping[int, float]) -> dict[int, float]:
    """The scores of one token's ``ids``, the least of ``scores`` for those that these do not hold."""
    least = min(scores.values(), default=0.0)
    return {expert: scores.get(expert, least) for expert in ids} if scores else {}


def combine_weights(scores: Mapping[int, float] | Sequence[float], ids: Sequence[int], norm_topk: bool) -> list[float]:
    """The weights of one token's experts ``ids``: their ``scores``, by expert, scaled to a sum of 1 if the model does
    so (``norm_topk``); equal shares where there are no scores."""
    weights = [scores[expert] for expert in ids] if scores else []
    if weights and not norm_topk:
        return weights
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else [1 / len(ids)] * len(ids)
