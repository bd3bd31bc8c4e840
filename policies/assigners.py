"""Assigners that look at each expert by itself: load all, stay where it lies, Fiddler's cost rule; and two that
choose between others by the step."""

from __future__ import annotations

from policies.objective import assignment_of, durations, makespan
from policies.protocols import Assigner
from policies.views import INFINITE_NS, Assignment, LayerView


def by_tokens(view: LayerView) -> list[int]:
    """Positions in ``active`` by descending workload, ties to the lower id."""
    tokens = view.routing.tokens
    return sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)


def settle(view: LayerView, on_gpu: list[bool]) -> Assignment:
    """A choice made expert by expert, run by descending workload, with its makespan in the shared objective."""
    gpu_ns, cpu_ns = durations(view)
    expected = makespan(gpu_ns, cpu_ns, on_gpu, view.costs[view.layer].first_cpu_ns)
    return assignment_of(view, by_tokens(view), on_gpu, expected)


class LoadAll:
    """Everything on the GPU; absent experts are copied, largest workload first (Speculating Experts, "on-demand")."""

    def assign(self, view: LayerView) -> Assignment:
        """All active experts to the GPU."""
        return settle(view, [True] * len(view.routing.active))


class ResidentOrCpu:
    """On the GPU what is there, or is being copied already; on the CPU the rest. Nothing is ever loaded."""

    def assign(self, view: LayerView) -> Assignment:
        """Every expert where it lies."""
        ready = view.ready_ns
        return settle(view, [ready[expert] != INFINITE_NS for expert in view.routing.active])


class CostRule:
    """An absent expert is loaded iff copying it and running it on the GPU is faster than the CPU.

    Fiddler, Section 3.3, Algorithm 1; what is resident, or on its way, runs on the GPU. Each expert by itself: neither
    the others' loads nor the first CPU expert's extra time count.
    """

    def assign(self, view: LayerView) -> Assignment:
        """Compare copy + GPU with CPU for every absent expert."""
        active, tokens = view.routing.active, view.routing.tokens
        costs = view.costs[view.layer]
        gpu_ns, cpu_ns, copy_ns = costs.gpu_ns, costs.cpu_ns, costs.copy_ns
        ready = view.ready_ns
        return settle(
            view,
            [
                ready[expert] != INFINITE_NS or copy_ns + gpu_ns[workload] < cpu_ns[workload]
                for expert, workload in zip(active, tokens, strict=True)
            ],
        )


class FromTokens:
    """One assigner for layers with at least ``least`` (token, expert) pairs, another for smaller ones."""

    def __init__(self, least: int, large: Assigner, small: Assigner) -> None:
        self.least, self.large, self.small = least, large, small

    def assign(self, view: LayerView) -> Assignment:
        """Count and choose."""
        return (self.large if sum(view.routing.tokens) >= self.least else self.small).assign(view)


class ByPhase:
    """One assigner for prefill, another for decode."""

    def __init__(self, prefill: Assigner, decode: Assigner) -> None:
        self.prefill, self.decode = prefill, decode

    def assign(self, view: LayerView) -> Assignment:
        """Choose by the phase."""
        return (self.prefill if view.phase == "prefill" else self.decode).assign(view)
