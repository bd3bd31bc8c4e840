"""Prefetching by the next layer's gate, applied to the present hidden state: the likeliest absent experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.protocols import Assigner
from policies.views import ExpertId, Forecast, LayerView


class NextGatePrefetcher:
    """Of the experts that the next gate chooses and that are not resident, the ``size`` likeliest.

    Likelier is who is chosen by more tokens, then who stands higher in some token's choice, then the lower id.
    ``guard`` keeps residents that the gate chooses from being displaced.
    """

    def __init__(self, size: int, into: Literal["cache", "staging"], guard: bool = False) -> None:
        self.size = size
        self.into = into
        self.guard = guard

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], assigner: Assigner) -> Sequence[ExpertId]:
        """Absent experts of the next layer, the likeliest first."""
        forecast = _next(view, forecasts)
        if forecast is None:
            return ()
        layer = forecast.layer
        there = view.residency.resident[layer]
        absent = [expert for expert in likeliest(forecast) if expert not in there]
        return [ExpertId(layer, expert) for expert in absent[: self.size]]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """What the gate chooses, where ``guard`` asks for it."""
        forecast = _next(view, forecasts) if self.guard else None
        return frozenset() if forecast is None else frozenset(ExpertId(forecast.layer, e) for e in forecast.active)


def likeliest(forecast: Forecast) -> list[int]:
    """The forecast's experts by descending tokens, then best place in a token's choice, then id."""
    place: dict[int, int] = {}
    for ids in forecast.token_ids:
        for rank, expert in enumerate(ids):
            if rank < place.get(expert, rank + 1):
                place[expert] = rank
    workload = dict(zip(forecast.active, forecast.tokens, strict=True))
    return sorted(workload, key=lambda expert: (-workload[expert], place.get(expert, 0), expert))


def _next(view: LayerView, forecasts: Sequence[Forecast]) -> Forecast | None:
    layer = view.layer + 1
    return next((f for f in forecasts if f.layer == layer and f.kind == "gate"), None)
