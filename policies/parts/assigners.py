"""Assigners that decide expert by expert: load all, stream the layer, stay in place, Fiddler's cost rule, a threshold;
and two that choose another assigner by the step."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertCosts, LayerView
from policies.protocols import Assigner


@lru_cache
def by_tokens(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Positions of these workloads in descending order, ties to the lower position. (Most layers of a decode have the
    same workloads: one token for each expert.)"""
    return tuple(sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True))


def settle(view: LayerView, on_gpu: list[bool]) -> Assignment:
    """A choice made expert by expert, run by descending workload, with its makespan in the shared objective."""
    active, tokens, ready, costs = view.routing.active, view.routing.tokens, view.ready_ns, view.costs[view.layer]
    there: list[int] = []
    coming: list[int] = []
    loads: list[int] = []
    cpu: list[int] = []
    t_gpu, t_cpu, cpu_ns = costs.first_gpu_ns, costs.first_cpu_ns, costs.cpu_ns
    for i in by_tokens(tokens):  # ``makespan`` of ``durations``, and ``assignment_of``, in one loop
        expert = active[i]
        if not on_gpu[i]:
            cpu.append(expert)
            t_cpu += cpu_ns[tokens[i]]
            continue
        own = costs if costs.narrow is None else costs.of(expert)
        duration, transfer = own.gpu_ns[tokens[i]], ready[expert]
        if not transfer:
            there.append(expert)
        elif transfer == INFINITE_NS:
            loads.append(expert)
            transfer = own.copy_ns
        else:
            coming.append(expert)
        t_gpu += duration if duration > transfer else transfer
    expected_ns = max(t_gpu if len(cpu) < len(active) else 0, t_cpu if cpu else 0)
    return Assignment((*there, *coming, *loads), tuple(cpu), tuple(loads), expected_ns)


class LoadAll:
    """Everything on the GPU; absent experts are copied, largest workload first (Speculating Experts, "on-demand")."""

    def assign(self, view: LayerView) -> Assignment:
        return settle(view, [True] * len(view.routing.active))


class StreamLayer:
    """All active experts on the GPU; the layer's other experts are copied before them, though no token needs them."""

    def __init__(self, experts: int) -> None:
        self._experts = range(experts)

    def assign(self, view: LayerView) -> Assignment:
        """Load the active experts, stream the others (the session leaves out those that were prefetched)."""
        active = view.ready_ns
        idle = tuple(expert for expert in self._experts if expert not in active)
        return settle(view, [True] * len(view.routing.active))._replace(streamed=idle)


class ResidentOrCpu:
    """Experts on the GPU run there, the others on the CPU; nothing is ever loaded.

    ``awaits``: an expert whose copy is in flight counts as on the GPU; if not, it runs on the CPU until it has arrived.
    """

    def __init__(self, awaits: bool = True) -> None:
        self._absent_ns = INFINITE_NS if awaits else 1

    def assign(self, view: LayerView) -> Assignment:
        ready, absent_ns = view.ready_ns, self._absent_ns
        return settle(view, [ready[expert] < absent_ns for expert in view.routing.active])


class CostRule:
    """An absent expert is loaded iff copying it and running it on the GPU is faster than the CPU.

    Fiddler, Section 3.3, Algorithm 1; experts that are resident or in flight run on the GPU. Each expert is judged by
    itself: neither the others' loads nor the first CPU expert's extra time count.
    """

    def assign(self, view: LayerView) -> Assignment:
        return settle(view, sooner_on_gpu(view))


def sooner_on_gpu(view: LayerView) -> list[bool]:
    """For every active expert, by itself: would the GPU finish it before the CPU?"""
    active, tokens = view.routing.active, view.routing.tokens
    costs = view.costs[view.layer]
    gpu_ns, cpu_ns, load_ns = costs.gpu_ns, costs.cpu_ns, costs.copy_ns + costs.first_gpu_ns
    ready = view.ready_ns
    return [
        ready[expert] != INFINITE_NS or load_ns + gpu_ns[workload] < cpu_ns[workload]
        for expert, workload in zip(active, tokens, strict=True)
    ]


class ThresholdAssigner:
    """An expert with a workload above ``theta`` runs on the GPU, loaded if absent; any other on the CPU.

    ``theta`` None: the break-even of the planner's costs, layer by layer. ``residents`` "stay": the threshold decides
    on absent experts alone, as in Fiddler, and those on the GPU, or in flight, run there; "split": it decides on all.
    """

    def __init__(self, theta: int | None = None, residents: Literal["stay", "split"] = "stay") -> None:
        self.theta = theta
        self.stay = residents == "stay"
        self._break_even: dict[int, int] = {}

    def assign(self, view: LayerView) -> Assignment:
        theta = self._theta(view) if self.theta is None else self.theta
        here = {expert for expert, ready in view.ready_ns.items() if self.stay and ready != INFINITE_NS}
        pairs = zip(view.routing.active, view.routing.tokens, strict=True)
        return settle(view, [tokens > theta or expert in here for expert, tokens in pairs])

    def _theta(self, view: LayerView) -> int:
        if view.layer not in self._break_even:
            self._break_even[view.layer] = break_even(view.costs[view.layer])
        return self._break_even[view.layer]


def break_even(costs: ExpertCosts) -> int:
    """The largest workload that, like all smaller ones, the CPU finishes no later than copy + GPU would."""
    workloads, load_ns = range(1, len(costs.cpu_ns)), costs.copy_ns + costs.first_gpu_ns
    pays = (tokens for tokens in workloads if load_ns + costs.gpu_ns[tokens] < costs.cpu_ns[tokens])
    return next(pays, len(costs.cpu_ns)) - 1


class FromTokens:
    """One assigner for layers with at least ``least`` (token, expert) pairs, another for smaller ones."""

    def __init__(self, least: int, large: Assigner, small: Assigner) -> None:
        self.least, self.large, self.small = least, large, small

    def assign(self, view: LayerView) -> Assignment:
        return (self.large if sum(view.routing.tokens) >= self.least else self.small).assign(view)


class ByPhase:
    """One assigner for prefill, another for decode."""

    def __init__(self, prefill: Assigner, decode: Assigner) -> None:
        self.prefill, self.decode = prefill, decode

    def assign(self, view: LayerView) -> Assignment:
        return (self.prefill if view.phase == "prefill" else self.decode).assign(view)
