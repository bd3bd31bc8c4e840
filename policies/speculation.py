"""The parts of Speculating Experts (Section 5.1, Algorithm 1): two expert buffers, filled one layer ahead.

While the experts of layer l are computed from one buffer, those forecast for layer l+1 are copied into the other; a
forecast may then be executed as it is, without asking the true router. The last layer forecasts nothing for the next
token (the paper does not say), so the first layer of every step is routed truly and copied when it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.objective import assignment_of, durations
from policies.protocols import Assigner
from policies.token_routing import routing_of_tokens
from policies.views import Assignment, Commitment, ExpertId, Forecast, LayerView, Routing


def forecast_of_next(view: LayerView, forecasts: Sequence[Forecast]) -> Forecast | None:
    """The forecast of the next layer, whichever kind is made of it."""
    return next((forecast for forecast in forecasts if forecast.layer == view.layer + 1), None)


class SpeculativeRouter:
    """Executes the forecast in decode: the next layer's routing is each token's ``top_k`` best, never verified.

    Weights are the forecast's scores where it has any, else equal shares. A prefill is routed truly (our reading:
    Section 5.2 leaves nothing to predict there).
    """

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k

    def route(self, view: LayerView) -> Routing:
        """A layer that was not committed is routed by its own router."""
        return view.routing

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        """In decode, the forecast is the next layer's routing."""
        forecast = forecast_of_next(view, forecasts)
        if forecast is None or view.phase != "decode":
            return None
        return Commitment(self._routing(forecast))

    def _routing(self, forecast: Forecast) -> Routing:
        k = self.top_k
        ids = [row[:k] for row in forecast.token_ids]
        weights = [row[:k] for row in forecast.token_scores] or [[1 / k] * k] * len(ids)
        return routing_of_tokens(ids, weights)


class InExpertOrder:
    """Everything on the GPU; what is absent is copied, and streamed through the buffers, in expert order."""

    def assign(self, view: LayerView) -> Assignment:
        """All active experts to the GPU, ascending."""
        gpu_ns, _ = durations(view)
        return assignment_of(view, range(len(gpu_ns)), [True] * len(gpu_ns), sum(gpu_ns))


class BufferPrefetcher:
    """Fills the other buffer with the experts forecast for the next layer, in expert order.

    In prefill there may be more than the buffer holds: they follow as its slots come free (ours; Section 5.2 loads
    every expert).
    """

    def __init__(self, into: Literal["cache", "staging"] = "staging") -> None:
        self.into = into

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], assigner: Assigner) -> Sequence[ExpertId]:
        """All experts that the forecast of the next layer names."""
        forecast = forecast_of_next(view, forecasts)
        return [] if forecast is None else [ExpertId(forecast.layer, expert) for expert in sorted(forecast.active)]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """Nobody."""
        return frozenset()


class LayerPrefetcher(BufferPrefetcher):
    """The same in decode; in prefill, all ``experts`` of the next layer (yalis, offloading/manager.py)."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], assigner: Assigner) -> Sequence[ExpertId]:
        """A whole layer, or what is forecast."""
        if view.phase == "decode":
            return super().rank(view, forecasts, assigner)
        return [ExpertId(view.layer + 1, expert) for expert in range(self.experts)]
