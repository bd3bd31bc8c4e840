"""Policies with a spoilt assigner, law 8 for exact ones, and what the router chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from policies.mechanism.views import Assignment, LayerView
from policies.papers.dali.parts import BeamAssigner, GreedyAssigner
from policies.parts.assigners import CostRule, LoadAll, ResidentOrCpu
from policies.protocols import Assigner
from sim.runs.demand import StepDemand
from trilane.testing.log import Routings
from trilane.testing.worlds import World, play


def part(world: World, name: str) -> Any:
    return getattr(play(world).session.policy, name)


class SpoiltAssigner:
    """An assigner whose answer is spoilt (or only looked at)."""

    def __init__(self, inner: Assigner, spoil: Callable[[LayerView, Assignment], Assignment]) -> None:
        self.inner, self.spoil = inner, spoil

    def assign(self, view: LayerView) -> Assignment:
        return self.spoil(view, self.inner.assign(view))


def law_8_exact(world: World, exact: Assigner) -> None:
    """In the objective that all assigners share, on every layer that some policy comes to."""
    others: list[Assigner] = [GreedyAssigner(), BeamAssigner(), CostRule(), LoadAll(), ResidentOrCpu()]

    def compare(view: LayerView, chosen: Assignment) -> Assignment:
        best = exact.assign(view).makespan_ns
        for other in others:
            name = type(other).__name__
            assert best <= other.assign(view).makespan_ns, f"law 8: {name} beats the exact one on {view}"
        return chosen

    play(world, {"assigner": SpoiltAssigner(part(world, "assigner"), compare)})


def routings_of(demand: Sequence[StepDemand]) -> Routings:
    """What the router chose: the routing in force for every policy that does not change it."""
    return {(s.index, layer): r.workload() for s in demand for layer, r in enumerate(s.routings)}
