"""Broken twins for the laws about several runs: 6 determinism, 7 no foresight, 8 bounds, 9 scaling."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from policies.assigners import LoadAll, ResidentOrCpu, settle
from policies.dali import GreedyAssigner
from policies.protocols import Assigner
from policies.registry import policy_names
from policies.views import Assignment, LayerView
from sim.bounds import LowerBound, lower_bound
from sim.cost_table import CostTable
from sim.lanes import Lane
from tests.invariants.test_laws import (
    digests_of_a_process,
    law_7_no_foresight,
    law_8_bound,
    law_8_exact,
    law_9_scaling,
)
from tests.invariants.worlds import World, digest, fixed_world, play

ON_DEMAND = fixed_world("on-demand")


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


def digests() -> dict[str, str]:
    """A hash of all spans of a run by hash order."""
    return {"hash order": digest(play(ON_DEMAND, {"assigner": HashOrder()}))}


def test_law_6_finds_a_policy_that_follows_hash_order() -> None:
    found = [digests_of_a_process(seed, "tests.invariants.test_broken_runs") for seed in ("1", "2")]
    assert found[0] != found[1]


def test_law_6_finds_a_policy_that_draws_without_a_seed() -> None:
    one, two = (digest(play(ON_DEMAND, {"assigner": Unseeded()})) for _ in range(2))
    assert one != two


class Peeking:
    """Puts on the GPU whatever the same layer will want in the next step."""

    def __init__(self, world: World) -> None:
        demand = world.demand(world.needs)
        self.active = {(s.index, layer): r.active for s in demand for layer, r in enumerate(s.routings)}

    def assign(self, view: LayerView) -> Assignment:
        later = self.active.get((view.step + 1, view.layer), ())
        return settle(view, [expert in later for expert in view.routing.active])


def test_law_7_finds_a_policy_that_peeks() -> None:
    def hold(seed: int) -> None:
        law_7_no_foresight(ON_DEMAND, seed, lambda world: {"assigner": Peeking(world)})

    assert "law 7: what comes later changed a decision" in _caught(hold, range(10))


@pytest.mark.parametrize(
    "bound",
    [
        lambda demand, costs, budget: LowerBound(*(2 * (ns or 0) for ns in lower_bound(demand, costs, budget))),
        lambda demand, costs, budget: lower_bound(demand, _without_cpu(costs), 0),
    ],
)
def test_law_8_finds_a_bound_that_is_too_high(bound: Callable[..., LowerBound]) -> None:
    """Twice as high, or blind for the CPU and for what the cache holds."""

    def hold(policy: str) -> None:
        law_8_bound(replace(fixed_world(policy), cache_bytes=10**6), bound)

    assert "beats its bound" in _caught(hold, ("oracle", "dali", "fiddler"))


def _without_cpu(costs: CostTable) -> CostTable:
    slow = tuple(e._replace(cpu_ns=tuple(ns * 10**6 for ns in e.cpu_ns)) for e in costs.experts)
    return replace(costs, experts=slow)


@pytest.mark.parametrize("posing", [GreedyAssigner(), LoadAll(), ResidentOrCpu()])
def test_law_8_finds_an_exact_assigner_that_is_not(posing: Assigner) -> None:
    assert "beats the exact one" in _caught(lambda policy: law_8_exact(fixed_world(policy), posing), policy_names())


def test_law_9_finds_a_lane_that_adds_a_nanosecond(monkeypatch: pytest.MonkeyPatch) -> None:
    world = replace(ON_DEMAND, costs=replace(ON_DEMAND.costs, cpu_permille=1000, copy_permille=1000))
    law_9_scaling(world, 3)
    sound = Lane.reserve

    def slow(self: Lane, ready: int, duration: int, *rest: Any, **named: Any) -> int:
        return sound(self, ready, duration + 1, *rest, **named)

    monkeypatch.setattr(Lane, "reserve", slow)
    with pytest.raises(AssertionError):
        law_9_scaling(world, 3)


def _caught(hold: Callable[[Any], None], worlds: Iterable[Any]) -> str:
    """What the law says in the first world that shows the offence."""
    for world in worlds:
        try:
            hold(world)
        except AssertionError as found:
            return str(found)
    return "nothing"
