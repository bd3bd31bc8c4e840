"""What prefetchers share: to find the forecast of the next layer, and to protect nobody."""

from __future__ import annotations

from collections.abc import Sequence

from policies.mechanism.views import ExpertId, Forecast, LayerView


def next_forecast(view: LayerView, forecasts: Sequence[Forecast], kind: str | None = None) -> Forecast | None:
    """The forecast of the next layer: of that kind, or of whichever is made."""
    layer = view.layer + 1
    for forecast in forecasts:
        if forecast.layer == layer and (kind is None or forecast.kind == kind):
            return forecast
    return None


class ProtectsNobody:
    """A prefetcher that keeps no resident from being displaced."""

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """Nobody."""
        return frozenset()
