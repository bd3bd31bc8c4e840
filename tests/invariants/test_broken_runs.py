"""Broken twins for the laws about bounds and costs: 8 and 9 (broken policies: tests/conformance)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from policies.papers.dali.parts import GreedyAssigner
from policies.parts.assigners import LoadAll, ResidentOrCpu
from policies.protocols import Assigner
from policies.registry import policy_names
from sim.costs.cost_table import CostTable
from sim.runs.bounds import LowerBound, lower_bound
from sim.timeline.lanes import Lane
from tests.kit.spoilt import law_8_exact
from trilane.testing.laws_of_runs import law_8_bound, law_9_scaling
from trilane.testing.random_worlds import fixed_world

ON_DEMAND = fixed_world("on-demand")


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
    alone = ON_DEMAND.costs.map_experts(lambda expert: expert._replace(cpu_permille=1000, copy_permille=1000))
    world = replace(ON_DEMAND, costs=alone)
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
