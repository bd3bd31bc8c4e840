"""Whole timelines worked out by hand: the GPU works while the host launches. Notation: ``hand_worked``.

A launch takes 1 ns a kernel: attention 12, gate 3, shared experts 5, an expert 5, combine 2, head 2. The lead is one
kernel's launch, 1, the tail one kernel, 2. Experts 0 and 1 are resident in both layers, and each of them has a token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.parts.assigners import LoadAll
from policies.parts.caches import StaticCache
from policies.protocols import Composition
from sim.costs.cost_table import LAUNCHES, CostTable
from sim.machine.plan_costs import PlanCost
from sim.runs.bounds import lower_bound
from sim.runs.spans import Span, spans_frame
from sim.runs.stalls import Stalls, stalls_of
from tests.kit.hand_worked import Placed, lane, lines, play, registered, step, told
from tests.kit.toys import uniform_costs
from trilane.testing.random_worlds import worlds
from trilane.testing.worlds import World
from trilane.testing.worlds import play as play_world

KERNEL_BY_KERNEL: dict[str, Any] = {
    "attention_launch_ns": 12, "gate_launch_ns": 3, "shared_launch_ns": 5, "expert_launch_ns": 5,
    "combine_launch_ns": 2, "head_launch_ns": 2, "lead_ns": 1, "tail_ns": 2,
}
SMALL: dict[str, Any] = {"attention_ns": 6, "gate_ns": 2, "shared_ns": 3, "gpu_ns": 3, "combine_ns": 1, "head_ns": 4}
LARGE: dict[str, Any] = {"attention_ns": 40, "gate_ns": 6, "shared_ns": 8, "gpu_ns": 15, "combine_ns": 5, "head_ns": 10}
DEMAND = step({0: 1, 1: 1}, {0: 1, 1: 1})


def all_resident(costs: CostTable) -> list[Span]:
    """The run of ``DEMAND`` where no expert is copied."""
    placed = Placed(((0, 1), (0, 1)))
    policy = Composition(placement=placed, assigner=LoadAll(), cache=StaticCache())
    return [s for s in play(policy, DEMAND, cache_bytes=placed.bytes, costs=costs) if s.kind != "place"]


LAUNCH_BOUND = """
host:
  0-20   launch L0            # 12 + 3 + 5
  20-21  wait L0              # the routing is here at 18, the host has launched at 20
  21-22  plan L0
  22-27  launch L0 E0
  27-32  launch L0 E1
  32-34  launch L0            # combine
  34-54  launch L1
  54-55  wait L1
  55-56  plan L1
  56-61  launch L1 E0
  61-66  launch L1 E1
  66-68  launch L1
  68-70  launch L-1           # LM head
  74-75  wait L-1
gpu:
  1-14   attention L0 ready=1 # lead 1; 6 by itself, but its 12 kernels are launched at 12; tail 2
  14-17  gate L0 ready=1      # 2 by itself, launched at 15, tail 2
  17-22  shared L0 ready=1    # 3 by itself, launched at 20, tail 2
  23-29  expert L0 E0 ready=23  # launched from 22 on, lead 1; launched at 27, tail 2
  29-34  expert L0 E1 ready=28  # the GPU is free at 29; launched at 32, tail 2
  34-35  combine L0 ready=33  # launched at 34; the tail is not longer than the work, 1
  35-48  attention L1 ready=35  # launched from 34 on, lead 1; its kernels at 46, tail 2
  48-51  gate L1              # launched at 49, tail 2
  51-56  shared L1            # launched at 54, tail 2
  57-63  expert L1 E0 ready=57
  63-68  expert L1 E1
  68-69  combine L1
  69-73  attention L-1 ready=69  # 4 by itself; launched at 70, tail 2: 72
d2h:
  17-18  routing L0
  51-52  routing L1
  73-74  routing L-1
"""

GPU_BOUND = """
host:
  0-20   launch L0
  48-49  wait L0
  49-50  plan L0
  50-55  launch L0 E0
  55-60  launch L0 E1
  60-62  launch L0
  62-82  launch L1
  137-138 wait L1
  138-139 plan L1
  139-144 launch L1 E0
  144-149 launch L1 E1
  149-151 launch L1
  151-153 launch L-1
  190-191 wait L-1
gpu:
  1-41   attention L0 ready=1 # 40 by itself: launched long before, at 12
  41-47  gate L0 ready=1
  47-55  shared L0 ready=1
  55-70  expert L0 E0 ready=51  # under the shared experts the host has launched it
  70-85  expert L0 E1 ready=56
  85-90  combine L0 ready=61
  90-130 attention L1 ready=63
  130-136 gate L1
  136-144 shared L1
  144-159 expert L1 E0 ready=140
  159-174 expert L1 E1
  174-179 combine L1
  179-189 attention L-1 ready=152
d2h:
  47-48  routing L0
  136-137 routing L1
  189-190 routing L-1
"""


@pytest.mark.parametrize(("work", "expected"), [(SMALL, LAUNCH_BOUND), (LARGE, GPU_BOUND)], ids=["small", "large"])
def test_a_span_lasts_as_long_as_the_slower_of_host_and_gpu(work: dict[str, Any], expected: str) -> None:
    spans = all_resident(uniform_costs(**KERNEL_BY_KERNEL, **work))
    assert told(spans, expected) == lines(expected)


def test_waiting_for_the_next_kernel_of_a_span_is_no_stall() -> None:
    # Launch-bound: 0-1, 22-23 and 56-57, leads that nothing covers, and 73-75, the tokens' way to the host.
    spans = all_resident(uniform_costs(**KERNEL_BY_KERNEL, **SMALL))
    assert stalls_of(spans_frame([tuple(s) for s in spans])) == Stalls(h2d_ns=0, cpu_ns=0, host_ns=5)  # type: ignore[misc]


@pytest.mark.parametrize(("work", "bound"), [(SMALL, 75 - 2 * 3), (LARGE, 191)], ids=["small", "large"])
def test_the_bound_follows_the_rule(work: dict[str, Any], bound: int) -> None:
    """The launch-bound run is 3 ns longer in each layer: the host, still at its launches, comes 2 late to the routing,
    and decides for 1. The other is not, since both happen under the shared experts.
    """
    costs = uniform_costs(**KERNEL_BY_KERNEL, **work, cpu_ns=1000)
    assert lower_bound([DEMAND], costs, 10**6).tpot_ns == bound


def test_the_dense_layers_are_launched_before_the_first_attention() -> None:
    expected = """
    gpu:
      1-20   attention L0 ready=1   # 2 + 6 by itself; launched at 6 + 12, tail 2
      20-23  gate L0 ready=1        # launched at 21
      23-28  shared L0 ready=1      # launched at 26
    """
    spans = all_resident(uniform_costs(**KERNEL_BY_KERNEL, **SMALL, dense_launch_ns=6, dense_ns=2))
    assert told(lane(spans, "gpu")[:3], expected) == lines(expected)


def test_an_expert_that_arrives_during_its_launch_starts_then() -> None:
    # Routed at 17, known at 21, planned at 22. Both experts of a layer are copied, each through staging.
    expected = """
    gpu:
      1-14   attention L0
      14-17  gate L0
      17-22  shared L0
      25-29  expert L0 E0 ready=25  # copied 22-25, launched 22-27; 3 by itself, tail 2
      29-34  expert L0 E1 ready=28  # copied 25-28, launched 27-32
      34-35  combine L0
    """
    costs = uniform_costs(**KERNEL_BY_KERNEL, **SMALL, copy_ns=3)
    spans = play(registered("on-demand", demand_slots=2), DEMAND, costs=costs)
    assert told([s for s in lane(spans, "gpu") if s.layer == 0], expected) == lines(expected)


def test_an_expert_that_arrives_later_takes_its_own_time() -> None:
    expected = """
    gpu:
      1-14   attention L0
      14-17  gate L0
      17-22  shared L0
      42-45  expert L0 E0 ready=42  # copied 22-42
      62-65  expert L0 E1 ready=62
      65-66  combine L0 ready=33
    """
    costs = uniform_costs(**KERNEL_BY_KERNEL, **SMALL, copy_ns=20)
    spans = play(registered("on-demand", demand_slots=2), DEMAND, costs=costs)
    assert told([s for s in lane(spans, "gpu") if s.layer == 0], expected) == lines(expected)


def test_one_launch_a_group_is_followed_by_its_work() -> None:
    """Recorded graphs: the lead is the whole launch, and then the rest is the GPU's own time."""
    one_launch = {name: 3 for name in LAUNCHES if name not in ("dense_launch_ns", "first_expert_launch_ns")}
    spans = all_resident(uniform_costs(**SMALL, **one_launch))
    expected = """
    gpu:
      9-15   attention L0 ready=9   # one launch for all of the group, 3 + 3 + 3
      15-17  gate L0
      17-20  shared L0
      23-26  expert L0 E0 ready=23  # routed at 18, planned at 20; launched at 23
      26-29  expert L0 E1 ready=26
      29-30  combine L0 ready=29
    """
    assert told([s for s in lane(spans, "gpu") if s.layer == 0], expected) == lines(expected)


# --- where nothing changes --------------------------------------------------------------------------------------------

some = settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))


def spans_with(world: World, **costs: Any) -> bytes:
    """The run of a world with other costs."""
    played = play_world(replace(world, costs=replace(world.costs, **costs)))
    return bytes(played.spans.to_csv(index=False), "utf-8")


@some
@given(worlds(), st.integers(0, 50), st.integers(0, 50))
def test_lead_and_tail_of_launches_that_take_no_time_change_nothing(world: World, lead_ns: int, tail_ns: int) -> None:
    free: dict[str, Any] = dict.fromkeys(LAUNCHES, 0)
    before = spans_with(world, **free, lead_ns=None, tail_ns=0)
    assert spans_with(world, **free, lead_ns=lead_ns, tail_ns=tail_ns) == before


@some
@given(worlds(), st.integers(0, 50))
def test_with_a_lead_as_long_as_the_launch_launch_and_work_are_added(world: World, tail_ns: int) -> None:
    before = spans_with(world, lead_ns=None, tail_ns=0)
    assert spans_with(world, lead_ns=1000, tail_ns=tail_ns) == before


def test_the_host_works_on_the_cache_while_the_gpu_computes() -> None:
    """10 ns a layer for what the cache learns: after the layer's launches, and before those of the next."""
    costs = uniform_costs(**KERNEL_BY_KERNEL, **LARGE)
    costs = replace(costs, plan_costs=replace(costs.plan_costs, observe={"default": PlanCost(10, 0)}))
    expected = """
host:
  0-20   launch L0
  48-49  wait L0
  49-50  plan L0
  50-55  launch L0 E0
  55-60  launch L0 E1
  60-62  launch L0
  62-72  observe L0 ready=50
  72-92  launch L1
  137-138 wait L1
  138-139 plan L1
  139-144 launch L1 E0
  144-149 launch L1 E1
  149-151 launch L1
  151-161 observe L1 ready=139
  161-163 launch L-1
  190-191 wait L-1
"""
    spans = [span for span in all_resident(costs) if span.lane == "host"]
    assert told(spans, expected) == lines(expected)
