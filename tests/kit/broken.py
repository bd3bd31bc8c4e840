"""Broken twins of one sound policy, what the laws say about them, and policies with a spoilt assigner."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policies.mechanism.views import Assignment, LayerView, PolicyError
from policies.papers.dali.parts import BeamAssigner, GreedyAssigner
from policies.parts.assigners import CostRule, LoadAll, ResidentOrCpu, settle
from policies.parts.caches import LruCache
from policies.parts.placements import NoPlacement
from policies.protocols import Assigner, Composition, Needs
from policies.registry import System
from policies.system import BuildContext, Policy
from sim.runs.demand import StepDemand
from trilane.testing.laws_of_runs import PolicyLaws
from trilane.testing.log import Routings
from trilane.testing.random_worlds import ORDINARY
from trilane.testing.worlds import World, play

LAWS = PolicyLaws()


@dataclass(frozen=True)
class Recent(Policy):
    """Keeps recent experts and leaves the others to the CPU. No parameters."""

    def compose(self, context: BuildContext) -> Composition:
        """As ``on-demand``, but for the assigner."""
        return Composition(placement=NoPlacement(), assigner=ResidentOrCpu(), cache=LruCache())


def twin(name: str, needs: Needs | None = None, **parts: Callable[[], Any]) -> System:
    """A sound policy, that keeps recent experts and leaves the others to the CPU, with some parts replaced."""

    class Twin(Recent):
        """With other parts."""

        def compose(self, context: BuildContext) -> Composition:
            return replace(super().compose(context), **{part: make() for part, make in parts.items()})

    Twin.needs = needs or Needs()  # type: ignore[method-assign, assignment]
    return System(name, "a twin", "nobody", Twin)


def caught(entry: System, law: str, **given: object) -> str:
    """The message of the law, or of the mechanism; "nothing" if the policy passes."""
    test = getattr(LAWS, law)
    try:
        test(entry=entry, **({"size": ORDINARY} if law.endswith(("size", "they_are")) else {}), **given)
    except (AssertionError, PolicyError) as found:
        return str(found)
    return "nothing"


# --- twins that other processes must find, by the names that they have here ------------------------------------------


class HashOrder:
    """Shuffles by what a set of strings happens to be ordered like."""

    def assign(self, view: LayerView) -> Assignment:
        names = {f"expert {e}" for e in view.routing.active}
        order = [int(name.split()[1]) for name in names]
        chosen = settle(view, [expert in order[::2] for expert in view.routing.active])
        return chosen._replace(cpu=tuple(sorted(chosen.cpu, key=order.index)))


class Unseeded:
    """Decides by chance that no seed governs."""

    def assign(self, view: LayerView) -> Assignment:
        return settle(view, [random.SystemRandom().random() < 0.5 for _ in view.routing.active])


SOUND = twin("sound")
HASHING = twin("hash-order", assigner=HashOrder)
UNSEEDED = twin("unseeded", assigner=Unseeded)


# --- a spoilt assigner, law 8 for exact ones, and the router's choice -------------------------------------------------

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
    """The router's choice: the routing in force for every policy that does not change it."""
    return {(s.index, layer): r.workload() for s in demand for layer, r in enumerate(s.routings)}
