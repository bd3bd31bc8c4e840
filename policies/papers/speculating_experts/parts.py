"""The parts of Speculating Experts (Section 5.1, Algorithm 1): two expert buffers, filled one layer ahead.

While the experts of layer l are computed from one buffer, those forecast for layer l+1 are copied into the other; a
forecast may then be executed as it is, without asking the true router. The last layer forecasts nothing for the next
token (the paper does not say), so the first layer of every step is routed truly and copied when it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.parts.forecasts import ProtectsNobody, next_forecast
from policies.parts.layer_streaming import NextLayer
from policies.parts.objective import assignment_of, durations
from policies.parts.routers import ForecastRouter


class SpeculativeRouter(ForecastRouter):
    """Executes the forecast in decode: the next layer's routing is each token's ``top_k`` best, never verified.

    A prefill is routed truly (our reading: Section 5.2 leaves nothing to predict there).
    """

    def __init__(self, top_k: int, norm_topk: bool = True) -> None:
        super().__init__(norm_topk)
        self.top_k = top_k

    def select(self, ranked: Sequence[int], view: LayerView) -> Sequence[int]:
        """The best, wherever they are."""
        return ranked[: self.top_k]


class InExpertOrder:
    """Everything on the GPU; what is absent is copied, and streamed through the buffers, in expert order."""

    def assign(self, view: LayerView) -> Assignment:
        """All active experts to the GPU, ascending."""
        gpu_ns, _ = durations(view)
        return assignment_of(view, range(len(gpu_ns)), [True] * len(gpu_ns), sum(gpu_ns))


class BufferPrefetcher(ProtectsNobody):
    """Fills the other buffer with the experts forecast for the next layer, in expert order.

    In prefill there may be more than the buffer holds: they follow as its slots come free (ours; Section 5.2 loads
    every expert).
    """

    def __init__(self, into: Literal["cache", "staging"] = "staging") -> None:
        self.into = into

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """All experts that the forecast of the next layer names."""
        forecast = next_forecast(view, forecasts)
        return [] if forecast is None else [ExpertId(forecast.layer, expert) for expert in sorted(forecast.active)]


class LayerPrefetcher(BufferPrefetcher):
    """The same in decode; in prefill, all experts of the next layer (yalis, offloading/manager.py)."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self._whole = NextLayer(layers, experts)

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """A whole layer, or what is forecast."""
        if view.phase == "decode":
            return super().rank(view, forecasts, plan)
        return self._whole.rank(view, forecasts, plan)
