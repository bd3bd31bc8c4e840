"""Prefetching by what a copy gains: absent experts that forecasts name, if they save more time than they cost. Ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.protocols import Assigner
from policies.views import ExpertCosts, ExpertId, Forecast, LayerView


class ForecastPrefetcher:
    """Absent experts of the forecast layers, the next layer first, each by descending forecast workload.

    A copy spares the CPU the expert's computation, and slows down whatever else the CPU does meanwhile. Where it would
    save less than it costs a busy CPU, it is not made. Experts that a forecast names are not displaced.
    """

    def __init__(self, into: Literal["cache", "staging"] = "cache") -> None:
        self.into = into

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], assigner: Assigner) -> Sequence[ExpertId]:
        """Absent experts worth a copy."""
        resident = view.residency.resident
        ranked = []
        for forecast in sorted(forecasts, key=_layer):
            layer, there = forecast.layer, resident[forecast.layer]
            costs = view.costs[layer]
            least = worthwhile_ns(costs)
            ranked += [
                ExpertId(layer, expert)
                for expert, tokens in zip(forecast.active, forecast.tokens, strict=True)
                if expert not in there and costs.cpu_ns[tokens] > least
            ]
        return ranked

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """Whoever will be needed, there already or once it has come."""
        return frozenset([ExpertId(forecast.layer, expert) for forecast in forecasts for expert in forecast.active])


def worthwhile_ns(costs: ExpertCosts) -> int:
    """CPU time that one copy costs a CPU that is busy all the while."""
    return costs.copy_ns * (1000 - costs.cpu_permille) // 1000


def _layer(forecast: Forecast) -> int:
    return forecast.layer
