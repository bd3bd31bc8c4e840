"""Prefetchers: the likeliest experts of a forecast, those whose copy saves time, a whole layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.mechanism.views import Assignment, ExpertCosts, ExpertId, Forecast, LayerView


def next_forecast(view: LayerView, forecasts: Sequence[Forecast], kind: str | None = None) -> Forecast | None:
    """The forecast of the next layer, of that kind or, with None, of any."""
    layer = view.layer + 1
    for forecast in forecasts:
        if forecast.layer == layer and (kind is None or forecast.kind == kind):
            return forecast
    return None


class NoProtection:
    """Base of prefetchers that protect no resident from being displaced."""

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """None."""
        return frozenset()


class TopPrefetcher:
    """The ``size`` absent experts of the next layer with the most workload in the forecast of this ``kind``.

    A prefetch into the cache must not displace an expert that the forecast
    names, resident or just prefetched: these are protected until the next foresight, unless ``guard`` is False (for a
    cache that sees further). Staged prefetches displace nothing.
    """

    def __init__(self, size: int, kind: str, into: Literal["cache", "staging"], *, guard: bool = True) -> None:
        self.size = size
        self.kind = kind
        self.into = into
        self._protects = guard and into == "cache"

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Absent experts of the next layer, largest forecast workload first."""
        forecast = next_forecast(view, forecasts, self.kind)
        if forecast is None:
            return ()
        layer, there = forecast.layer, view.residency.resident[forecast.layer]
        absent = [expert for expert in forecast.active if expert not in there]
        return [ExpertId(layer, expert) for expert in absent[: self.size]]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """The experts that the forecast names, where prefetches displace residents."""
        forecast = next_forecast(view, forecasts, self.kind) if self._protects else None
        return frozenset() if forecast is None else frozenset(ExpertId(forecast.layer, e) for e in forecast.active)


class ForecastPrefetcher:
    """Absent experts of the forecast layers, the next layer first, each by descending forecast workload, as long as a
    copy is expected to save time (ours). All experts that a forecast names are protected.

    A copy saves the expert's computation on the CPU, less the time by which it arrives too late, and slows down a CPU
    that is busy meanwhile. Forecasts are taken to be right.
    """

    def __init__(self, into: Literal["cache", "staging"] = "cache") -> None:
        self.into = into

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Absent experts worth a copy; the link carries this layer's loads first, then one prefetch after another."""
        costs = view.costs[view.layer]
        link_ns = view.h2d_backlog_ns + len(plan.loads) * costs.copy_ns
        layer_ns = plan.makespan_ns + costs.between_ns
        ranked = []
        for forecast in sorted(forecasts, key=_layer):
            layer = forecast.layer
            there, costs = view.residency.resident[layer], view.costs[layer]
            ahead_ns = (layer - view.layer) * layer_ns
            for expert, tokens in zip(forecast.active, forecast.tokens, strict=True):
                if expert in there:
                    continue
                late_ns = max(link_ns + costs.copy_ns - ahead_ns, 0)
                if costs.cpu_ns[tokens] - late_ns <= (slowdown_ns(costs) if plan.cpu else 0):
                    break
                ranked.append(ExpertId(layer, expert))
                link_ns += costs.copy_ns
        return ranked

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """All forecast experts, resident or not."""
        return frozenset([ExpertId(forecast.layer, expert) for forecast in forecasts for expert in forecast.active])


def slowdown_ns(costs: ExpertCosts) -> int:
    """Time that a CPU which is busy throughout loses to one copy."""
    return costs.copy_ns * (1000 - costs.cpu_permille) // 1000


def _layer(forecast: Forecast) -> int:
    return forecast.layer


class NextLayer(NoProtection):
    """All experts of the next layer, in id order."""

    into: Literal["cache", "staging"] = "staging"

    def __init__(self, layers: int, experts: int) -> None:
        self._ids = [[ExpertId(layer, expert) for expert in range(experts)] for layer in range(layers)]

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """In id order; no forecast is used."""
        return self._ids[view.layer + 1]
