"""HybriMoE's impact-driven prefetching (Section IV-C): copy the experts that save the next layers most time."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from itertools import chain
from operator import neg
from typing import Literal

from policies.mechanism.views import Assignment, ExpertCosts, ExpertId, Forecast, LayerView, expert_ids
from policies.papers.hybrimoe.schedule import Schedule


class ImpactPrefetcher:
    """Simulates the schedule on the forecast routing of the next layers, with and without each absent expert, and picks
    the greatest gain in makespan, repeatedly, each time as if the picks so far were cached.

    ``size``: the most picks at once; fewer if nothing gains. ``discount``: a gain n layers ahead counts ``discount`` to
    the power of n - 1 (ours; 1 in the paper). An expert that would not arrive before its layer's experts start counts
    only by the share of its copy that is hidden (our reading): the link falls idle after this layer's loads, and a
    layer starts after this layer's experts, those of the layers between, and what passes between layers. ``arrival``
    False counts gains in full, whenever the copy would arrive (the paper has no such rule).

    Picks go to the cache, and the experts that forecasts name are protected there: so the victim costs the simulated
    layer nothing, and a layer gains nothing if no other expert could be evicted. ``pooled``: layers share one pool, so
    that one can. ``into`` "staging": nothing is evicted. Ties go to the nearer layer, then to the lower id.
    """

    def __init__(
        self, schedule: Schedule, size: int = 4, discount: float = 1.0, kind: str = "gate", pooled: bool = False,
        arrival: bool = True, into: Literal["cache", "staging"] = "cache",
    ) -> None:
        self.schedule = schedule
        self.size = size
        self.discount = discount
        self.kind = kind
        self.pooled = pooled
        self.arrival = arrival
        self.into: Literal["cache", "staging"] = into

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """All forecast experts, resident or not: a pick must not displace the one before it."""
        mine = [forecast for forecast in forecasts if forecast.kind == self.kind]
        return frozenset(chain.from_iterable([expert_ids(forecast.layer, forecast.active) for forecast in mine]))

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """The picks, greatest gain first."""
        layers = self._forecast_layers(view, forecasts)
        costs = view.costs[view.layer]
        link_ns = view.h2d_backlog_ns + len(plan.loads) * costs.copy_ns
        picks: list[ExpertId] = []
        while len(picks) < self.size:
            best = self._best(view.layer, layers, plan.makespan_ns + costs.between_ns, link_ns)
            if best is None:
                break
            picks.append(best.pick())
            link_ns += best.costs.copy_ns
        return picks

    def _forecast_layers(self, view: LayerView, forecasts: Sequence[Forecast]) -> list[_ForecastLayer]:
        """The forecast layers, nearest first."""
        by_layer = {forecast.layer: forecast for forecast in forecasts if forecast.kind == self.kind}
        resident, always_room = view.residency.resident, self.pooled or self.into == "staging"
        return [
            _ForecastLayer(self.schedule, by_layer[layer], resident[layer], view.costs[layer], always_room)
            for layer in sorted(by_layer)
        ]

    def _best(self, here: int, layers: Sequence[_ForecastLayer], start_ns: int, link_ns: int) -> _ForecastLayer | None:
        """The layer whose best pick counts most, if any counts at all."""
        best, most = None, 0.0
        for layer in layers:
            copy_ns = layer.costs.copy_ns
            hidden_ns = min(start_ns - link_ns, copy_ns) if self.arrival else copy_ns
            if hidden_ns > 0 and layer.gain_ns > 0:
                value = layer.gain_ns * hidden_ns / copy_ns
                if self.discount != 1.0:
                    value *= self.discount ** (layer.number - here - 1)
                if value > most:
                    best, most = layer, value
            start_ns += layer.makespan_ns + layer.costs.between_ns
        return best


class _ForecastLayer:
    """A later layer as forecast: its cached and absent experts, and which to copy first."""

    def __init__(
        self, schedule: Schedule, forecast: Forecast, resident: Collection[int], costs: ExpertCosts, always_room: bool
    ) -> None:
        self.number = forecast.layer
        self.costs = costs
        self._schedule = schedule
        self._cached: list[int] = []  # workloads, descending
        self._absent: list[int] = []
        self._ids: list[int] = []  # of the absent
        for expert, tokens in zip(forecast.active, forecast.tokens, strict=True):
            if expert in resident:
                self._cached.append(tokens)
            else:
                self._absent.append(tokens)
                self._ids.append(expert)
        self._room = len(self._ids) if always_room else len(resident) - len(self._cached)  # for picks
        self.makespan_ns = schedule.makespan_ns(costs, self._cached, self._absent)
        self._best: tuple[int, int] | None = None  # gain, place among the absent

    @property
    def gain_ns(self) -> int:
        """Time by which the best pick shortens the makespan, in ns; 0 if there is none."""
        if self._best is None:
            self._best = self._search() if self._room > 0 and self._absent else (0, -1)
        return self._best[0]

    def pick(self) -> ExpertId:
        """Count the best pick as cached."""
        assert self._best is not None, "pick() needs a gain"
        gain_ns, place = self._best
        self._cached, self._absent = self._with(place)
        self.makespan_ns -= gain_ns
        self._room -= 1
        self._best = None
        return ExpertId(self.number, self._ids.pop(place))

    def _search(self) -> tuple[int, int]:
        """Try each workload once: equal ones gain the same, and the lower id comes first."""
        best, where, last = 0, -1, 0
        for place, tokens in enumerate(self._absent):
            if tokens == last:
                continue
            last = tokens
            gain = self.makespan_ns - self._schedule.makespan_ns(self.costs, *self._with(place))
            if gain > best or (gain == best > 0 and self._ids[place] < self._ids[where]):
                best, where = gain, place
        return best, where

    def _with(self, place: int) -> tuple[list[int], list[int]]:
        """Workloads of cached and absent experts, if the absent expert at ``place`` were cached."""
        absent, cached = self._absent.copy(), self._cached.copy()
        insort(cached, absent.pop(place), key=neg)
        return cached, absent
