"""Prefetching by one forecast of the next layer: the absent experts that it expects most of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.parts.forecasts import next_forecast


class TopPrefetcher:
    """Of the next layer's experts that the forecast of this ``kind`` names and that are not resident, the ``size`` with
    most forecast workload.

    ``ties``: equal workloads by "id", the lower first, or by "place", whoever stands higher in some token's choice,
    then the lower id (needs tokens). What goes into the cache must not displace whom the forecast names, there already
    or just prefetched: they are protected until the next foresight, unless ``guard`` is False, since the cache knows
    better. Staged prefetches displace nobody.
    """

    def __init__(
        self, size: int, kind: str, into: Literal["cache", "staging"], *,
        ties: Literal["id", "place"] = "id", guard: bool = True,
    ) -> None:  # fmt: skip
        self.size = size
        self.kind = kind
        self.into = into
        self._by_place = ties == "place"
        self._protects = guard and into == "cache"

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Absent experts of the next layer, largest forecast workload first."""
        forecast = next_forecast(view, forecasts, self.kind)
        if forecast is None:
            return ()
        layer, there = forecast.layer, view.residency.resident[forecast.layer]
        ranked = likeliest(forecast) if self._by_place else forecast.active
        absent = [expert for expert in ranked if expert not in there]
        return [ExpertId(layer, expert) for expert in absent[: self.size]]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """Whom the forecast names, where prefetches displace residents."""
        forecast = next_forecast(view, forecasts, self.kind) if self._protects else None
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
