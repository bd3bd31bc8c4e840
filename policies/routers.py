"""Routers. All but the true one change what the model computes, and live with the paper that proposes them."""

from __future__ import annotations

from collections.abc import Sequence

from policies.views import Commitment, Forecast, LayerView, Routing


class TrueRouter:
    """Runs what the model's own router chose, and commits nothing."""

    looks_ahead = False

    def route(self, view: LayerView) -> Routing:
        """The router's own experts."""
        return view.routing

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        """Every layer's own router speaks."""
        return None
