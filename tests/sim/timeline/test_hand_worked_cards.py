"""Timelines of two GPUs worked out by hand, a layer on each, under on-demand loading. Notation: ``hand_worked``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from policies.registry import BuildContext, compose
from sim.costs.cost_table import CostTable
from sim.machine.peers import PeerLink
from sim.runs.spans import Span
from tests.kit.hand_worked import EXPERTS, lines, play_cards, step, told
from tests.kit.toys import uniform_costs

TWO_GPUS = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0            # combine
  19-20  launch L1            # the host goes on to GPU 1 at once, before that has its input
  77-78  wait L1
  78-79  plan L1
  79-80  launch L1 E1
  80-81  launch L1 E2
  81-82  launch L1
  82-83  launch L-1
  130-131 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  36-41  expert L0 E0 ready=36
  56-61  expert L0 E1 ready=56
  61-62  combine L0
gpu1:
  64-74  attention L1 ready=64    # its input is here at 64
  74-76  gate L1 ready=64
  99-104 expert L1 E1 ready=99
  119-124 expert L1 E2 ready=119
  124-125 combine L1
  125-129 attention L-1           # the head is on the last GPU
h2d:
  16-36  demand L0 E0 ready=16
  36-56  demand L0 E1 ready=16    # through staging: one cache slot
  61-61  release L0 E1
h2d1:
  63-64  hand_over L1 ready=63 bytes=4
  79-99  demand L1 E1 ready=79
  99-119 demand L1 E2 ready=79
  124-124 release L1 E2
d2h:
  13-14  routing L0
  62-63  hand_over L0 ready=62 bytes=4   # the layer ended at 62
d2h1:
  76-77  routing L1
  129-130 routing L-1

host, step 1:
  131-132 launch L0
  145-146 wait L0
  146-147 plan L0
  147-148 launch L0 E1
  148-149 launch L0 E2
  149-150 launch L0
  150-151 launch L1
  208-209 wait L1
  209-210 plan L1
  210-211 launch L1 E1            # resident since step 0
  211-212 launch L1 E0
  212-213 launch L1
  213-214 launch L-1
  241-242 wait L-1
gpu, step 1:
  132-142 attention L0
  142-144 gate L0
  167-172 expert L0 E1
  187-192 expert L0 E2
  192-193 combine L0
gpu1, step 1:
  195-205 attention L1
  205-207 gate L1
  211-216 expert L1 E1
  230-235 expert L1 E0 ready=230
  235-236 combine L1
  236-240 attention L-1
h2d, step 1:
  147-147 evict L0 E0
  147-167 demand L0 E1
  167-187 demand L0 E2
  192-192 release L0 E2
h2d1, step 1:
  194-195 hand_over L1
  210-230 demand L1 E0
  235-235 release L1 E0
d2h, step 1:
  144-145 routing L0
  193-194 hand_over L0
d2h1, step 1:
  207-208 routing L1
  240-241 routing L-1
"""


UNEQUAL_GPUS = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  launch L1
  92-93  wait L1
  93-94  plan L1
  94-95  launch L1 E1
  95-96  launch L1 E2
  96-97  launch L1
  97-98  launch L-1
  196-197 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  36-41  expert L0 E0
  56-61  expert L0 E1
  61-62  combine L0
gpu1:
  66-86  attention L1 ready=66    # all of its times are twice those of GPU 0
  86-90  gate L1
  134-144 expert L1 E1 ready=134
  174-184 expert L1 E2 ready=174
  184-186 combine L1
  186-194 attention L-1
h2d:
  16-36  demand L0 E0
  36-56  demand L0 E1             # through staging: one cache slot
  61-61  release L0 E1
h2d1:
  63-66  hand_over L1 ready=63    # 1 down the one link, 3 up the other
  94-134 demand L1 E1             # a copy takes 40
  134-174 demand L1 E2            # into the second slot
d2h:
  13-14  routing L0
  62-63  hand_over L0
d2h1:
  90-92  routing L1
  194-196 routing L-1

host, step 1:
  197-198 launch L0
  211-212 wait L0
  212-213 plan L0
  213-214 launch L0 E1
  214-215 launch L0 E2
  215-216 launch L0
  216-217 launch L1
  289-290 wait L1
  290-291 plan L1
  291-292 launch L1 E1
  292-293 launch L1 E0
  293-294 launch L1
  294-295 launch L-1
  353-354 wait L-1
gpu, step 1:
  198-208 attention L0
  208-210 gate L0
  233-238 expert L0 E1
  253-258 expert L0 E2
  258-259 combine L0
gpu1, step 1:
  263-283 attention L1
  283-287 gate L1
  292-302 expert L1 E1            # resident, as E2 is, which makes room
  331-341 expert L1 E0
  341-343 combine L1
  343-351 attention L-1
h2d, step 1:
  213-213 evict L0 E0
  213-233 demand L0 E1
  233-253 demand L0 E2
  258-258 release L0 E2
h2d1, step 1:
  260-263 hand_over L1
  291-291 evict L1 E2
  291-331 demand L1 E0
d2h, step 1:
  210-211 routing L0
  259-260 hand_over L0
d2h1, step 1:
  287-289 routing L1
  351-353 routing L-1
"""
QUICK = uniform_costs(1)
SLOW = uniform_costs(
    1, gpu_ns=10, attention_ns=20, gate_ns=4, combine_ns=2, head_ns=8, copy_ns=40, routing_ns=2, activations_ns=2,
    result_ns=3,
)


STEPS = step({0: 1, 1: 1}, {1: 1, 2: 1}), step({1: 1, 2: 1}, {0: 1, 1: 1}, index=1)


def played(costs: Sequence[CostTable], slots: Sequence[int]) -> list[Span]:
    """Two steps on two GPUs, each with its costs and so many cache slots."""
    policies = [compose("on-demand", {}, context=BuildContext("toy", EXPERTS, 1)) for _ in costs]
    return play_cards(policies, *STEPS, slots=slots, costs=costs)


def test_two_gpus_work_in_turn_each_with_its_own_slots_and_links() -> None:
    """Each has one cache slot. A hand-over takes 1 down and 1 up."""
    assert told(played([QUICK, QUICK], [1, 1]), TWO_GPUS) == lines(TWO_GPUS)


def test_a_slower_gpu_with_more_slots_and_a_slower_link_takes_its_own_times() -> None:
    assert told(played([QUICK, SLOW], [1, 2]), UNEQUAL_GPUS) == lines(UNEQUAL_GPUS)


@pytest.mark.parametrize(("own_lane", "lane"), [(True, "peer1"), (False, "h2d1")])
def test_a_link_between_them_is_crossed_once(own_lane: bool, lane: str) -> None:
    """4 bytes take 2 and 3 more; by way of the host they took 1 down and 1 up, so that all after them is 3 later."""
    linked = replace(QUICK, peer=PeerLink(2, 4 / 3e-9, own_lane))
    spans, by_host = played([QUICK, linked], [1, 1]), played([QUICK, QUICK], [1, 1])
    [first, _] = [span for span in spans if span.kind == "hand_over"]
    assert first[:5] == (lane, 62, 62, 67, "hand_over")
    attention, before = (next(span for span in run if span[0] == "gpu1") for run in (spans, by_host))
    assert (attention.start_ns, before.start_ns) == (67, 64)
    assert max(span.end_ns for span in spans) == max(span.end_ns for span in by_host) + 2 * 3
