"""Broken twins: a policy, lane or memory that breaks a rule is caught by the session, or by the law that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import pytest

from policies.residency import Residency
from policies.views import Assignment, ExpertId, LayerView, PolicyError
from sim.cpu_lane import CpuLane
from sim.lanes import Lane
from tests.invariants.laws import check_all
from tests.invariants.worlds import SpoiltAssigner, fixed_world, part, play


class BrokenCache:
    """A cache that picks the first resident, pinned or not."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.members = inner, set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def admitted(self, id: ExpertId, group: int) -> None:
        self.members.add(id)
        self.inner.admitted(id, group)

    def evicted(self, id: ExpertId, group: int) -> None:
        self.members.discard(id)
        self.inner.evicted(id, group)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return next((id for id in sorted(self.members) if id in blocked and id.layer == incoming.layer), None)


WORLD = fixed_world("on-demand")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda view, a: a._replace(cpu=a.gpu[:1]), "expected each of"),  # computes an expert twice
        (lambda view, a: a._replace(gpu=a.gpu[:-1], loads=a.loads[:-1]), "expected each of"),  # skips one
        (lambda view, a: a._replace(loads=a.gpu), "expected the absent experts"),  # loads residents
        (lambda view, a: a._replace(gpu=(*a.gpu, 99)), "expected each of"),  # runs one that nobody chose
    ],
)
def test_a_broken_policy_is_caught(spoil: Callable[[LayerView, Assignment], Assignment], message: str) -> None:
    inner = part(WORLD, "assigner")
    with pytest.raises(PolicyError, match=message):
        play(WORLD, {"assigner": SpoiltAssigner(inner, spoil)})


def test_a_broken_cache_that_evicts_a_pinned_expert_is_caught() -> None:
    with pytest.raises(PolicyError, match="pinned"):
        play(WORLD, {"cache": BrokenCache(part(WORLD, "cache"))})


@pytest.mark.parametrize("lane", ["gpu", "host", "d2h"])
def test_a_broken_lane_that_starts_too_early_is_caught(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is free, or before the work is ready."""
    sound = Lane.reserve

    def hasty(self: Lane, *given: Any, **named: Any) -> int:
        end = sound(self, *given, **named)
        row = self.recorder.rows[-1]
        if self.name == lane and row[2] > 3:
            self.recorder.rows[-1] = (row[0], row[1], row[2] - 3, *row[3:])
        return end

    monkeypatch.setattr(Lane, "reserve", hasty)
    _caught("law [23]")


@pytest.mark.parametrize("lane", ["gpu", "host", "d2h"])
def test_a_broken_lane_that_idles_is_caught(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Lane.reserve

    def lazy(self: Lane, ready: int, *rest: Any, **named: Any) -> int:
        self.free_ns = max(self.free_ns, ready) + 2 * (self.name == lane)
        return sound(self, ready, *rest, **named)

    monkeypatch.setattr(Lane, "reserve", lazy)
    _caught("law 5")


def test_a_broken_cpu_that_does_not_wait_for_activations_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = CpuLane.add

    def hasty(self: CpuLane, experts: Any, workload: Any, ready: int, *rest: Any) -> None:
        sound(self, experts, workload, ready - 5, *rest)

    monkeypatch.setattr(CpuLane, "add", hasty)
    _caught("law 2: the CPU needs the activations")


def test_a_broken_memory_with_too_many_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Residency.__init__

    def generous(self: Residency, *given: Any) -> None:
        sound(self, *given)
        self._free = [free + 600 for free in self._free]

    monkeypatch.setattr(Residency, "__init__", generous)
    _caught("law 4", "on-demand")


def _caught(message: str, policy: str = "fiddler") -> None:
    world = fixed_world(policy)
    played = play(world)
    with pytest.raises(AssertionError, match=message):
        check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots)
