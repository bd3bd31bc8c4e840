"""Broken twins of one sound policy, and what the laws say about them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from policies.mechanism.views import Assignment, LayerView, PolicyError
from policies.parts.assigners import ResidentOrCpu, settle
from policies.parts.caches import LruCache
from policies.parts.placements import NoPlacement
from policies.protocols import Composition, Needs
from policies.registry import System
from policies.system import BuildContext, Policy
from trilane.testing.policy_laws import PolicyLaws
from trilane.testing.random_worlds import ORDINARY

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
    """What the law says, or the mechanism; "nothing" if the policy passes."""
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
