"""Prefetchers: the likeliest experts of a forecast, those whose copy saves time, a whole layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Literal, Protocol

from policies.mechanism.shared_dram import rates_together
from policies.mechanism.views import Assignment, ExpertCosts, ExpertId, Forecast, LayerView, Phase, expert_ids

LATER_USES = 0.5  # of a prefetched expert while it stays, beyond those of the expert that it displaces, where no cache
# tells: between 0 and 1 in the models tried, and least where any expert is as likely as another
MEAN_OF = 16  # layers, of which a running mean is about the mean


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
    """The ``size`` absent experts of the next layer with the most workload in the forecast of this ``kind``; with
    ``among`` "all", the absent ones of the ``size`` experts with the most.

    A prefetch into the cache must not displace an expert that the forecast
    names, resident or just prefetched: these are protected until the next foresight, unless ``guard`` is False (for a
    cache that sees further). Staged prefetches displace nothing.
    """

    def __init__(
        self, size: int, kind: str, into: Literal["cache", "staging"], *, guard: bool = True,
        among: Literal["absent", "all"] = "absent",
    ) -> None:
        self.size = size
        self._considered = size if among == "all" else None
        self.kind = kind
        self.into = into
        self._protects = guard and into == "cache"

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Absent experts of the next layer, largest forecast workload first."""
        forecast = next_forecast(view, forecasts, self.kind)
        if forecast is None:
            return ()
        layer, there = forecast.layer, view.residency.resident[forecast.layer]
        absent = [expert for expert in forecast.active[: self._considered] if expert not in there]
        return expert_ids(layer, absent[: self.size])

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """The experts that the forecast names, where prefetches displace residents."""
        forecast = next_forecast(view, forecasts, self.kind) if self._protects else None
        return frozenset() if forecast is None else frozenset(expert_ids(forecast.layer, forecast.active))


class Valued(Protocol):
    """A cache that tells experts apart by what they are worth to it."""

    def advantages(self, layer: int, experts: Sequence[int], group: int) -> list[float | None]:
        """The share of its own worth by which each expert exceeds the least member of ``group``; None: unknown."""
        ...


class ForecastPrefetcher:
    """Absent experts of the forecast layers, the next layer first, each by descending forecast workload, if a copy is
    expected to save more time than it costs (ours). All experts that a forecast names are protected.

    A copy saves the expert's computation on the CPU, less the time by which it arrives too late, and, where it stays in
    the cache, part of a later use: its advantage over what it displaces, as far as the ``cache`` knows that, else
    ``LATER_USES``. It costs what it slows down the CPU, as busy as that is in the mean of the layers so far: a copy may
    outlast the layer at work. Forecasts are taken to be right.
    """

    def __init__(
        self, into: Literal["cache", "staging"] = "cache", cache: Valued | None = None, *, pooled: bool = False
    ) -> None:
        self.into = into
        self.pooled = pooled
        self._cache = cache
        self._busy_ns: dict[Phase, int] = {}  # the mean x MEAN_OF

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Absent experts worth a copy; the link carries this layer's loads first, then one prefetch after another."""
        costs = view.costs[view.layer]
        cpu_ns = _cpu_ns(view, plan)
        rates = rates_together(costs, cpu_ns, len(plan.cpu) * costs.cpu_ns[1])
        takes_ns, slows_ns = _copy_among_layers(costs, self._busy_mean_ns(view.phase, cpu_ns), rates)
        link_ns = view.h2d_backlog_ns + len(plan.loads) * takes_ns
        layer_ns = plan.makespan_ns + costs.between_ns
        ranked = []
        for forecast in sorted(forecasts, key=attrgetter("layer")) if len(forecasts) > 1 else forecasts:
            layer, resident = forecast.layer, view.residency.resident[forecast.layer]
            absent = [pair for pair in zip(forecast.active, forecast.tokens, strict=True) if pair[0] not in resident]
            if not absent:
                continue
            ahead_ns, expert_ns = (layer - view.layer) * layer_ns, view.costs[layer].cpu_ns
            later_uses = self._later_uses(layer, [expert for expert, _ in absent])
            for (expert, tokens), uses in zip(absent, later_uses, strict=True):
                saved_ns, late_ns = expert_ns[tokens], link_ns + takes_ns - ahead_ns
                if late_ns > 0:
                    saved_ns = max(saved_ns - late_ns, 0)
                if saved_ns + uses * expert_ns[1] > slows_ns:
                    ranked.append(ExpertId(layer, expert))
                    link_ns += takes_ns
        return ranked

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """All forecast experts, resident or not."""
        return frozenset(
            chain.from_iterable([expert_ids(forecast.layer, forecast.active) for forecast in forecasts])
        )

    def _later_uses(self, layer: int, experts: Sequence[int]) -> Sequence[float]:
        """Expected later uses of each expert that is copied now."""
        if self.into == "staging" or self._cache is None:
            return [0.0 if self.into == "staging" else LATER_USES] * len(experts)
        known = self._cache.advantages(layer, experts, 0 if self.pooled else layer)
        return [LATER_USES if advantage is None else advantage for advantage in known]

    def _busy_mean_ns(self, phase: Phase, cpu_ns: int) -> int:
        """CPU time in ns of a layer of this phase: a running mean, which takes up ``cpu_ns`` of the present layer."""
        before_ns = self._busy_ns.get(phase, cpu_ns * MEAN_OF)
        self._busy_ns[phase] = now_ns = before_ns + cpu_ns - before_ns // MEAN_OF
        return now_ns // MEAN_OF


def _cpu_ns(view: LayerView, plan: Assignment) -> int:
    """Time in ns of a plan's CPU experts, one after another and without contention."""
    if not plan.cpu:
        return 0
    cpu_ns, workload = view.costs[view.layer].cpu_ns, view.routing.workload()
    return sum([cpu_ns[workload[expert]] for expert in plan.cpu])


def _copy_among_layers(costs: ExpertCosts, busy_ns: int, rates: tuple[int, int]) -> tuple[int, int]:
    """Duration of a copy and delay of the CPU by it, both in ns, if the CPU is busy for ``busy_ns`` of every layer."""
    if not busy_ns:
        return costs.copy_ns, 0
    cpu_rate, copy_rate = rates
    carried = copy_rate * busy_ns + 1000 * costs.between_ns  # by the link in a layer, x 1000
    takes = 1000 * (busy_ns + costs.between_ns) * costs.copy_ns // carried
    return takes, (1000 - cpu_rate) * busy_ns * costs.copy_ns // carried


class NextLayer(NoProtection):
    """All experts of the next layer, in id order."""

    into: Literal["cache", "staging"] = "staging"

    def __init__(self, layers: int, experts: int) -> None:
        self._ids = [expert_ids(layer, range(experts)) for layer in range(layers)]

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """In id order; no forecast is used."""
        return self._ids[view.layer + 1]
