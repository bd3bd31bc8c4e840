"""Prefetching by what a copy gains: absent experts that forecasts name, if they save more time than they cost. Ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.mechanism.views import Assignment, ExpertCosts, ExpertId, Forecast, LayerView


class ForecastPrefetcher:
    """Absent experts of the forecast layers, the next layer first, each by descending forecast workload, as far as a
    copy is expected to gain time. Whoever a forecast names is protected.

    A copy spares the CPU the expert's computation, less the time that it comes too late, and slows down a CPU that is
    at work meanwhile. Forecasts are taken to be right.
    """

    def __init__(self, into: Literal["cache", "staging"] = "cache") -> None:
        self.into = into

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Absent experts worth a copy; the link is busy with this layer's loads, and then with one after another."""
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
        """Whoever will be needed, there already or once it has come."""
        return frozenset([ExpertId(forecast.layer, expert) for forecast in forecasts for expert in forecast.active])


def slowdown_ns(costs: ExpertCosts) -> int:
    """Time that a CPU which is at work all the while loses to one copy."""
    return costs.copy_ns * (1000 - costs.cpu_permille) // 1000


def _layer(forecast: Forecast) -> int:
    return forecast.layer
