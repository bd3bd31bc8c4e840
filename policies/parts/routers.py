"""The true router, and what those have in common that take a forecast for the next layer's routing.

Routers that change what the model computes live with the paper that proposes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from policies.mechanism.views import Commitment, Forecast, LayerView, Routing
from policies.parts.forecasts import next_forecast
from policies.parts.token_routing import combine_weights, routing_of_tokens, scores_by_expert


class TrueRouter:
    """Runs what the model's own router chose, and commits nothing."""

    looks_ahead = False

    def route(self, view: LayerView) -> Routing:
        """The router's own experts."""
        return view.routing

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        """Every layer's own router speaks."""
        return None


class ForecastRouter(ABC):
    """In decode, the forecast of the next layer decides its routing, and the layer's own router is not asked.

    Weights are the forecast's scores over the experts that a token gets, in the model's way (``norm_topk``); equal
    shares where the forecast has no scores. A layer without a forecast, and a prefill, are routed truly.
    """

    looks_ahead = True

    def __init__(self, norm_topk: bool = True) -> None:
        self.norm_topk = norm_topk

    @abstractmethod
    def select(self, ranked: Sequence[int], view: LayerView) -> Sequence[int]:
        """One token's experts of the next layer, best first, from all that the forecast names, best first."""

    def ahead(self, routing: Routing, view: LayerView) -> tuple[int, ...]:
        """Who of the next layer is computed on this layer's activations: nobody."""
        return ()

    def route(self, view: LayerView) -> Routing:
        """The router's own experts."""
        return view.routing

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        """The next layer's routing, if there is a forecast of it."""
        forecast = next_forecast(view, forecasts)
        if forecast is None or view.phase != "decode":
            return None
        ids = [self.select(ranked, view) for ranked in forecast.token_ids]
        tokens = zip(scores_by_expert(forecast), ids, strict=True)
        routing = routing_of_tokens(ids, [combine_weights(*token, self.norm_topk) for token in tokens])
        return Commitment(routing, self.ahead(routing, view))
