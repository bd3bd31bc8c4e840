"""Whole layers streamed through the GPU: all of a layer's experts, whether a token needs them or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.parts.assigners import settle
from policies.parts.forecasts import ProtectsNobody


class StreamLayer:
    """All active experts on the GPU, and the others of the layer copied before them for nothing."""

    def __init__(self, experts: int) -> None:
        self._experts = range(experts)

    def assign(self, view: LayerView) -> Assignment:
        """Load what is active, stream the rest (what has come ahead, the session leaves out)."""
        active = view.ready_ns
        idle = tuple(expert for expert in self._experts if expert not in active)
        return settle(view, [True] * len(view.routing.active))._replace(streamed=idle)


class NextLayer(ProtectsNobody):
    """All experts of the next layer, in id order."""

    into: Literal["cache", "staging"] = "staging"

    def __init__(self, layers: int, experts: int) -> None:
        self._ids = [[ExpertId(layer, expert) for expert in range(experts)] for layer in range(layers)]

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """As they come; nothing is forecast."""
        return self._ids[view.layer + 1]
