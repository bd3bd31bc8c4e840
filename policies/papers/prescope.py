"""PreScope (LayerScope): loads, prefetches and CPU experts of several layers in one cost (arXiv 2509.23638)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertCosts, ExpertId, Forecast, LayerView
from policies.parts.assigners import by_tokens
from policies.parts.caches import LruCache
from policies.parts.objective import assignment_of, together
from policies.parts.placements import random_or_popular
from policies.protocols import Composition, Needs
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count


class LayerWork:
    """A layer's experts: those on the GPU or on their way there, and absent ones, the largest workloads first.

    Those that are there when the layer begins share kernels; one that is loaded runs by itself (``first_gpu_ns``).
    """

    def __init__(self, costs: ExpertCosts, present: Sequence[int], absent: Sequence[int], arrives_ns: int = 0) -> None:
        """``present``, ``absent``: workloads. ``arrives_ns``: until the last of those on their way is there."""
        self.costs, self.absent, self.arrives_ns, self._shared = costs, absent, arrives_ns, bool(present)
        self._present_ns = sum(costs.gpu_ns[tokens] for tokens in present)
        self._gpu_ns = [0, *accumulate(costs.gpu_ns[tokens] for tokens in absent)]
        self._cpu_ns = [0, *accumulate(costs.cpu_ns[tokens] for tokens in absent)]

    def takes_ns(self, loads: int, link_ns: int, copied: int = 0, ahead: int = 0, start_ns: int = 0) -> int:
        """Time of the layer in ns, with ``copied`` absent experts copied ahead and ``loads`` of the others loaded.

        The rest runs on the CPU. The link is busy for ``link_ns`` at the beginning, with the last of those copied if
        there are any; ``ahead`` copies for later layers follow, which slow the CPU. The layer begins ``start_ns`` from
        now.
        """
        costs, on_gpu = self.costs, copied + loads
        copies_ns, rest = link_ns + loads * costs.copy_ns, len(self.absent) - on_gpu
        kernels = loads + (self._shared or copied > 0)
        gpu_ns = self._present_ns + self._gpu_ns[on_gpu] + kernels * costs.first_gpu_ns
        takes_ns = max(gpu_ns, self.arrives_ns - start_ns)
        if copied and link_ns:
            takes_ns = max(takes_ns, link_ns + self._alone_ns(copied - 1))
        fixed_ns = costs.first_cpu_ns + costs.exchange_ns if rest else 0
        cpu_ns, read_ns = fixed_ns + self._cpu_ns[-1] - self._cpu_ns[on_gpu], fixed_ns + rest * costs.cpu_ns[1]
        if loads:
            _, arrived = together(costs, cpu_ns, read_ns, copies_ns)
            takes_ns = max(takes_ns, arrived + self._alone_ns(on_gpu - 1))
        if rest:
            cpu_end, _ = together(costs, cpu_ns, read_ns, copies_ns + ahead * costs.copy_ns)
            takes_ns = max(takes_ns, cpu_end)
        return takes_ns

    def _alone_ns(self, place: int) -> int:
        """GPU time of one copied expert by itself, in ns."""
        return self.costs.gpu_ns[self.absent[place]] + self.costs.first_gpu_ns

    def copies_ahead(self, takes_ns: int, loads: int, link_ns: int) -> int:
        """Number of copies for later layers that end before the next one is routed."""
        return max((takes_ns + self.costs.between_ns - link_ns) // self.costs.copy_ns - loads, 0)


class Least(NamedTuple):
    """A time, and the number of copies that gives it; the fewest among equals."""

    ns: int
    copies: int


def later_ns(layers: Sequence[LayerWork], copied: int, link_ns: int = 0, start_ns: int = 0) -> int:
    """The time of the layers after one, which begin ``start_ns`` from now. ``copied`` of their absent experts are
    copied ahead, the first layers' first, the last of them ``link_ns`` after the beginning.

    Each layer loads what shortens it, and while it is at work, the link goes on for those after it.
    """
    total = 0
    for work in layers:
        mine = min(copied, len(work.absent))
        takes_ns, loads = _shortest(work, mine, link_ns, start_ns)
        copied += work.copies_ahead(takes_ns, loads, link_ns) - mine
        total, link_ns, start_ns = total + takes_ns, 0, start_ns + takes_ns + work.costs.between_ns
    return total


def _shortest(work: LayerWork, copied: int, link_ns: int, start_ns: int) -> Least:
    """The loads of one layer by itself."""
    best = Least(work.takes_ns(0, link_ns, copied, start_ns=start_ns), 0)
    for loads in range(1, len(work.absent) - copied + 1):
        if link_ns + loads * work.costs.copy_ns >= best.ns:
            break
        best = min(best, Least(work.takes_ns(loads, link_ns, copied, start_ns=start_ns), loads))
    return best


def best_loads(work: LayerWork, later: Sequence[LayerWork], link_ns: int) -> int:
    """The loads of a layer for which it and the later ones take the least time together."""
    best = Least(INFINITE_NS, 0)
    for loads in range(len(work.absent) + 1):
        if link_ns + loads * work.costs.copy_ns >= best.ns:
            break
        takes_ns = work.takes_ns(loads, link_ns)
        start_ns = takes_ns + work.costs.between_ns
        after_ns = later_ns(later, work.copies_ahead(takes_ns, loads, link_ns), start_ns=start_ns)
        best = min(best, Least(takes_ns + after_ns, loads))
    return best.copies


def best_copies(work: LayerWork, later: Sequence[LayerWork], loads: int, link_ns: int) -> int:
    """The copies ahead, next to ``loads``, for which this layer and the later ones take the least time together; one of
    them may end too late, since the next layer decides anew."""
    best = Least(INFINITE_NS, 0)
    for ahead in range(sum(len(layer.absent) for layer in later) + 1):
        takes_ns = work.takes_ns(loads, link_ns, ahead=ahead)
        start_ns = takes_ns + work.costs.between_ns
        late_ns = max(link_ns + (loads + ahead) * work.costs.copy_ns - start_ns, 0)
        best = min(best, Least(takes_ns + later_ns(later, ahead, late_ns, start_ns), ahead))
        if late_ns:
            break
    return best.copies


class Horizon:
    """The layers after the one at work as far as they are forecast; filled by the prefetcher, read by the assigner."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._step, self._forecasts = -1, dict[int, Forecast]()

    def learn(self, view: LayerView, forecasts: Sequence[Forecast]) -> None:
        """The newest forecast of each later layer."""
        self._forecasts = {} if view.step != self._step else self._forecasts
        self._step = view.step
        self._forecasts.update((forecast.layer, forecast) for forecast in forecasts)

    def layers(self, view: LayerView) -> list[Forecast]:
        """Forecasts of the layers that follow, without a gap."""
        following = []
        for layer in range(view.layer + 1, view.layer + 1 + self._lookahead):
            if view.step != self._step or layer not in self._forecasts:
                break
            following.append(self._forecasts[layer])
        return following


def absent_of(view: LayerView, forecast: Forecast) -> dict[ExpertId, int]:
    """The forecast experts that are neither on the GPU nor on their way there, with their workloads."""
    resident = view.residency.resident[forecast.layer]
    named = zip([ExpertId(forecast.layer, expert) for expert in forecast.active], forecast.tokens, strict=True)
    return {key: tokens for key, tokens in named if key.expert not in resident and key not in view.flying}


def forecast_work(view: LayerView, forecast: Forecast) -> LayerWork:
    """The workloads of a forecast layer, as its experts are now."""
    layer, absent = forecast.layer, absent_of(view, forecast)
    pairs = zip(forecast.active, forecast.tokens, strict=True)
    present = [tokens for expert, tokens in pairs if ExpertId(layer, expert) not in absent]
    coming = any(ExpertId(layer, expert) in view.flying for expert in forecast.active)
    return LayerWork(view.costs[layer], present, list(absent.values()), view.h2d_backlog_ns if coming else 0)


class CrossLayerAssigner:
    """Loads as many of a layer's absent experts, the largest first, as make this layer and those of the horizon take
    the least time together: what the link does for this layer it does not do for them. Residents stay on the GPU."""

    def __init__(self, horizon: Horizon) -> None:
        self._horizon = horizon

    def assign(self, view: LayerView) -> Assignment:
        """Try each number of loads."""
        active, tokens, ready = view.routing.active, view.routing.tokens, view.ready_ns
        order = by_tokens(view.routing.tokens)
        absent = [i for i in order if ready[active[i]] == INFINITE_NS]
        present = [i for i in order if ready[active[i]] < INFINITE_NS]
        arrives_ns = max((ready[active[i]] for i in present), default=0)
        work = LayerWork(
            view.costs[view.layer], [tokens[i] for i in present], [tokens[i] for i in absent], arrives_ns
        )
        later = [forecast_work(view, forecast) for forecast in self._horizon.layers(view)]
        loads = best_loads(work, later, view.h2d_backlog_ns)
        on_gpu = [ready[expert] < INFINITE_NS for expert in active]
        for i in absent[:loads]:
            on_gpu[i] = True
        return assignment_of(view, order, on_gpu, work.takes_ns(loads, view.h2d_backlog_ns))


class CrossLayerPrefetcher:
    """As many copies for the next layer, and then for the one after it, as make the rest of this layer and the horizon
    take the least time together; all experts that the next layer's forecast names are protected."""

    into: Literal["cache", "staging"] = "cache"

    def __init__(self, horizon: Horizon) -> None:
        self._horizon = horizon

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        return frozenset(
            ExpertId(f.layer, expert) for f in forecasts if f.layer == view.layer + 1 for expert in f.active
        )

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """The largest absent experts, the next layer's first."""
        self._horizon.learn(view, forecasts)
        later = self._horizon.layers(view)
        works = [forecast_work(view, forecast) for forecast in later]
        workload, costs = view.routing.workload(), view.costs[view.layer]
        loaded = set(plan.loads)
        present = [workload[expert] for expert in plan.gpu if expert not in loaded]
        absent = [workload[expert] for expert in (*plan.loads, *plan.cpu)]
        work = LayerWork(costs, present, absent, plan.makespan_ns)
        wanted = [key for forecast in later for key in absent_of(view, forecast)]
        return wanted[: best_copies(work, works, len(plan.loads), view.h2d_backlog_ns)]


@register(
    "prescope",
    "loads, prefetches and CPU experts of several layers in one cost",
    source="PreScope / LayerScope (arXiv 2509.23638)",
)
@dataclass(frozen=True)
class PreScope(Policy):
    """Known by its abstract, and by what others quote of Sections 4.3 and 4.4.

    lookahead: layers after the one at work that are planned with it (two in the paper).
    start: the experts on the GPU at first, by layer: random, or the most popular ones (ours).
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    lookahead: Literal[1, 2, 3] = 2
    start: Literal["random", "popular"] = "random"
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        forecasts = tuple(("gate", ahead) for ahead in range(1, self.lookahead + 1))
        return Needs(forecasts=forecasts, calibration=self.start == "popular")

    def compose(self, context: BuildContext) -> Composition:
        """Assigner and prefetcher share what they know of the layers to come; the cache is an LRU by layer (ours)."""
        horizon = Horizon(self.lookahead)
        return Composition(
            placement=random_or_popular(self.start, context.seed),
            assigner=CrossLayerAssigner(horizon),
            prefetcher=CrossLayerPrefetcher(horizon),
            cache=LruCache(),
            demand_slots=self.demand_slots,
        )
