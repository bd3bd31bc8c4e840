"""Broken twins of the mechanism and broken runs: every law finds its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from policies.mechanism.residency import Residency
from policies.mechanism.session import Session
from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView, Plan, PolicyError, Routing, Updates
from policies.papers.dali.parts import GreedyAssigner
from policies.parts.assigners import LoadAll, ResidentOrCpu
from policies.protocols import Assigner
from policies.registry import policy_names
from sim.costs.cost_table import LAUNCHES, CostTable
from sim.runs.bounds import LowerBound, lower_bound
from sim.timeline import cpu_lane
from sim.timeline.copy_lane import CopyLane
from sim.timeline.cpu_lane import CpuLane
from sim.timeline.gpu_lane import GpuLane
from sim.timeline.lanes import Lane, Neighbour
from sim.timeline.layer_parts import LayerParts
from tests.kit.broken import SpoiltAssigner, law_8_exact, part, routings_of
from trilane.testing.laws import check_all, law_1_conservation
from trilane.testing.laws_of_runs import law_8_bound, law_9_scaling
from trilane.testing.random_worlds import ConstantSteps, fixed_world
from trilane.testing.work_conservation import law_5_background_copies, law_5_work_conservation
from trilane.testing.worlds import PlayedWorld, World, play


@pytest.mark.parametrize("lane", ["gpu", "host", "d2h"])
def test_a_broken_lane_that_starts_too_early_is_caught(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is free, or before the work is ready."""
    kind, method = _lane(lane)
    sound = getattr(kind, method)

    def hasty(self: Any, *given: Any, **named: Any) -> int:
        end: int = sound(self, *given, **named)
        row = self.recorder.rows[-1]
        if row[0] == lane and row[2] > 3:
            self.recorder.rows[-1] = (row[0], row[1], row[2] - 3, *row[3:])
        return end

    monkeypatch.setattr(kind, method, hasty)
    _caught("law [23]")


@pytest.mark.parametrize("lane", ["gpu", "host", "d2h"])
def test_a_broken_lane_that_idles_is_caught(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, method = _lane(lane)
    sound = getattr(kind, method)

    def lazy(self: Any, ready_ns: int, *rest: Any, **named: Any) -> int:
        self.free_ns = max(self.free_ns, ready_ns) + 2 * (self.name == lane)
        end: int = sound(self, ready_ns, *rest, **named)
        return end

    monkeypatch.setattr(kind, method, lazy)
    _caught("law 5")


def _lane(name: str) -> tuple[type, str]:
    """What reserves the lane: its class and the name of the method."""
    return (GpuLane, "run") if name == "gpu" else (Lane, "reserve")


@pytest.mark.parametrize(("broken", "message"), [
    (lambda first_ns, end_ns: (first_ns, 0), "law 2: the last kernel has been launched and has run at"),
    (lambda first_ns, end_ns: (first_ns - 3, end_ns), "law 2: the first kernel can run at"),
    (lambda first_ns, end_ns: (end_ns, end_ns), "law 5: .* could have started at"),
    (lambda first_ns, end_ns: (first_ns, end_ns + 1), "law 5: the GPU could be done at"),
], ids=["overtakes its launches", "starts before its launch", "waits for its whole launch", "lingers"])
def test_a_broken_gpu_next_to_its_launches_is_caught(
    broken: Callable[[int, int], tuple[int, int]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a world bound by its launches."""
    sound = GpuLane.launch

    def launch(self: GpuLane, *given: Any) -> tuple[int, int]:
        return broken(*sound(self, *given))

    world = fixed_world("on-demand")
    slow = dict.fromkeys(LAUNCHES, 30)
    world = replace(world, costs=replace(world.costs, **slow, lead_ns=4, tail_ns=2))
    _check(world)
    monkeypatch.setattr(GpuLane, "launch", launch)
    with pytest.raises(AssertionError, match=message):
        _check(world)


@pytest.mark.parametrize(("wrong_ns", "message"), [
    (-1, "law 2: the last kernel has been launched and has run at"), (500, "law 5: the GPU could be done at"),
], ids=["helped", "slowed beyond both rates"])
def test_a_broken_gpu_next_to_its_neighbours_is_caught(
    wrong_ns: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a world whose GPU shares cores and memory, and need not wait for its launches."""
    sound = Neighbour.slowed
    world = fixed_world("fiddler")
    rates = {"gpu_permille": 500, "gpu_with_cpu_permille": 500}
    world = replace(world, costs=replace(world.costs, **dict.fromkeys(LAUNCHES, 0), **rates))
    _check(world)
    monkeypatch.setattr(Neighbour, "slowed", lambda self, *given: max(0, sound(self, *given) + wrong_ns))
    with pytest.raises(AssertionError, match=message):
        _check(world)


def test_a_broken_cpu_that_does_not_wait_for_activations_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = CpuLane.add

    def hasty(self: CpuLane, kind: str, experts: Any, workload: Any, ready: int, *rest: Any, **named: Any) -> None:
        sound(self, kind, experts, workload, ready - 5, *rest, **named)

    monkeypatch.setattr(CpuLane, "add", hasty)
    _caught("law 2: the CPU needs the activations")


def _deferring(assign: Callable[[LayerView], Assignment] | None = None) -> PlayedWorld:
    """A world in which the CPU takes long, and layers defer experts: as ``kt-deferral`` does, or as ``assign`` does."""
    world = fixed_world("kt-deferral")
    slow = world.costs.map_experts(lambda costs: costs._replace(cpu_ns=[500 * tokens for tokens in range(33)]))
    world = replace(world, costs=slow, cache_bytes=0)
    inner = part(world, "assigner")
    spoilt = {"assigner": SpoiltAssigner(inner, lambda view, _: assign(view))} if assign else None
    played = play(world, spoilt)
    check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs)
    return played


def _first_layer_later(view: LayerView) -> Assignment:
    """The CPU computes the first layer, which leaves all of it to the second, and the GPU the others."""
    made = (LoadAll() if view.layer else ResidentOrCpu()).assign(view)
    return made._replace(deferred=made.cpu)


def test_a_layer_that_waits_for_what_it_defers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = LayerParts.start

    def waits(self: LayerParts, plan: Plan, planned: int) -> None:
        sound(self, plan, planned)
        if plan.deferred:
            self._cpu_batches[plan.layer] += 1
            self._cpu_batches[plan.layer + 1] -= 1

    assert "deferred" in set(_deferring().spans.kind)
    monkeypatch.setattr(LayerParts, "start", waits)
    monkeypatch.setitem(cpu_lane._AHEAD, "deferred", (0, 0))
    with pytest.raises(AssertionError, match=r"law 5: .*kind='combine'.* could have started at"):
        _deferring()


def test_a_layer_that_does_not_wait_for_what_the_one_before_has_deferred_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "deferred" in set(_deferring(_first_layer_later).spans.kind)
    sound = LayerParts.start

    def hasty(self: LayerParts, plan: Plan, planned: int) -> None:
        sound(self, plan, planned)
        self._cpu_batches[plan.layer + 1] -= bool(plan.deferred)

    monkeypatch.setattr(LayerParts, "start", hasty)
    monkeypatch.setitem(cpu_lane._AHEAD, "deferred", (0, 99))
    with pytest.raises(AssertionError, match=r"law [12]: "):
        _deferring(_first_layer_later)


def test_a_broken_memory_with_too_many_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Residency.__init__

    def generous(self: Residency, *given: Any) -> None:
        sound(self, *given)
        self._free = [free + 600 for free in self._free]
        self._room = [room + 600 for room in self._room]

    monkeypatch.setattr(Residency, "__init__", generous)
    _caught("law 4", "on-demand")


def test_a_broken_memory_that_takes_narrow_copies_for_smaller_than_they_are_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = Residency.size_of
    _check(fixed_world("hobbit"))
    monkeypatch.setattr(Residency, "size_of", lambda self, key: sound(self, key) // (1 if key.expert < 8 else 2))
    _caught("law 4: expert .* bytes, not those of", "hobbit")


def test_a_broken_memory_that_promises_more_than_there_is_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Residency.__init__

    def generous(self: Residency, *given: Any) -> None:
        sound(self, *given)
        self._free = [free + 600 for free in self._free]

    monkeypatch.setattr(Residency, "__init__", generous)
    with pytest.raises(PolicyError, match=r"no room for the copy of ExpertId.*100 bytes are missing"):
        play(fixed_world("on-demand"))


def _caught(message: str, policy: str = "fiddler") -> None:
    with pytest.raises(AssertionError, match=message):
        _check(fixed_world(policy))


def _check(world: World) -> None:
    played = play(world)
    check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs)


# --- law 1, once nobody checks assignments ----------------------------------------------------------------------------


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda view, a: a._replace(cpu=(*a.cpu, *a.gpu[:1])), r"computed on \['(gpu|cpu)', '(gpu|cpu)'\], not once"),
    (lambda view, a: a._replace(cpu=a.cpu[1:]), r"computed on \[\], not once"),
    (lambda view, a: a._replace(cpu=(*a.cpu, *_unasked(view))), "but no token was routed to it"),
])
def test_law_1_finds_a_policy_that_no_check_holds_back(
    spoil: Callable[[LayerView, Assignment], Assignment], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes an expert twice, not at all, or (with a workload, so that it can be computed) one nobody chose."""
    monkeypatch.setattr("policies.mechanism.session.check_assignment", lambda *_: None)
    monkeypatch.setattr(Routing, "workload", lambda self: _Everything(zip(self.active, self.tokens, strict=True)))
    world = fixed_world("fiddler")
    played = play(world, {"assigner": SpoiltAssigner(part(world, "assigner"), spoil)})
    with pytest.raises(AssertionError, match=message):
        law_1_conservation(played.spans, routings_of(played.demand))


class _Everything(dict[int, int]):
    """One token for whom nobody chose."""

    def __missing__(self, expert: int) -> int:
        return 1


def _unasked(view: LayerView) -> tuple[int, ...]:
    return tuple(e for e in range(8) if e not in view.routing.active)[:1]


# --- law 5, for copies that nobody waits for --------------------------------------------------------------------------


def test_law_5_finds_a_link_that_sleeps_after_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wakes it when a layer has ended: its swaps wait for the next plan."""
    deaf: list[object] = []
    end_layer, wake = Session.end_layer, CopyLane.wake

    def ends(self: Session) -> Updates:
        deaf.append(self)
        return end_layer(self)

    def wakes(self: CopyLane, *event: Any) -> None:
        if not deaf:
            wake(self, *event)
        deaf.clear()

    _lawful(SWAPPING)
    monkeypatch.setattr(Session, "end_layer", ends)
    monkeypatch.setattr(CopyLane, "wake", wakes)
    with pytest.raises(AssertionError, match=r"law 5: h2d rests from .* although the swap of"):
        _lawful(SWAPPING)


@pytest.mark.parametrize("into", ["staging", "cache"])
def test_law_5_finds_a_link_that_sleeps_after_a_foresight(into: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetches start with the next event that wakes it: the layer's end, long after the foresight here."""
    world = replace(fixed_world("oracle"), cache_bytes=800)
    step = world.costs.step(1, (1,))._replace(combine_ns=500)
    world = replace(world, costs=replace(world.costs, steps=ConstantSteps(step)))
    changes = {"prefetcher": Ahead(into), "prefetch_slots": 2}
    law_5_background_copies((played := play(world, changes)).spans, played.session)
    start_queued = CopyLane.start_queued

    def sleeps(self: CopyLane, kind: Any) -> None:
        if kind != "prefetch":
            start_queued(self, kind)
        self._queued_ns[kind] = self._clock.now

    monkeypatch.setattr(CopyLane, "start_queued", sleeps)
    with pytest.raises(AssertionError, match=r"law 5: h2d rests from .* although the prefetch of"):
        law_5_background_copies((played := play(world, changes)).spans, played.session)


class Ahead:
    """Wants every expert of the next layer."""

    def __init__(self, into: str) -> None:
        self.into = into

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        return [ExpertId(view.layer + 1, expert) for expert in range(8)]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        return frozenset()


SWAPPING = replace(fixed_world("dali"), cache_bytes=800)


def _lawful(world: World) -> None:
    played = play(world)
    law_5_work_conservation(played.spans, played.demand_slots, played.costs)
    law_5_background_copies(played.spans, played.session)


# --- broken runs ------------------------------------------------------------------------------------------------------

ON_DEMAND = fixed_world("on-demand")


@pytest.mark.parametrize("bound", [
    lambda demand, costs, budget: LowerBound(*(2 * (ns or 0) for ns in lower_bound(demand, costs, budget))),
    lambda demand, costs, budget: lower_bound(demand, _without_cpu(costs), 0),
])
def test_law_8_finds_a_bound_that_is_too_high(bound: Callable[..., LowerBound]) -> None:
    """Twice as high, or blind for the CPU and for what the cache holds."""

    def hold(policy: str) -> None:
        law_8_bound(replace(fixed_world(policy), cache_bytes=10**6), bound)

    assert "beats its bound" in _first_caught(hold, ("oracle", "dali", "fiddler"))


def _without_cpu(costs: CostTable) -> CostTable:
    slow = tuple(e._replace(cpu_ns=tuple(ns * 10**6 for ns in e.cpu_ns)) for e in costs.experts)
    return replace(costs, experts=slow)


@pytest.mark.parametrize("posing", [GreedyAssigner(), LoadAll(), ResidentOrCpu()])
def test_law_8_finds_an_exact_assigner_that_is_not(posing: Assigner) -> None:
    message = _first_caught(lambda policy: law_8_exact(fixed_world(policy), posing), policy_names())
    assert "beats the exact one" in message


def test_law_9_finds_a_lane_that_adds_a_nanosecond(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ON_DEMAND.costs.map_experts(lambda expert: expert._replace(cpu_permille=1000, copy_permille=1000))
    world = replace(ON_DEMAND, costs=alone)
    law_9_scaling(world, 3)
    sound = Lane.reserve

    def slow(self: Lane, ready: int, duration: int, *rest: Any, **named: Any) -> int:
        return sound(self, ready, duration + 1, *rest, **named)

    monkeypatch.setattr(Lane, "reserve", slow)
    with pytest.raises(AssertionError):
        law_9_scaling(world, 3)


def _first_caught(hold: Callable[[Any], None], worlds: Iterable[Any]) -> str:
    """Message of the law in the first world that shows the offence."""
    for world in worlds:
        try:
            hold(world)
        except AssertionError as found:
            return str(found)
    return "nothing"
