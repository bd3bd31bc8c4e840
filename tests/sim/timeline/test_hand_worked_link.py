"""Timelines worked out by hand: shared DRAM, queued results, full staging. Notation and costs: ``hand_worked``."""

from __future__ import annotations

from dataclasses import replace

from policies.protocols import Composition
from tests.kit.hand_worked import EXPERTS, LAYERS, TOP_K, lane, lines, play, registered, step, told
from tests.kit.toys import uniform_costs
from trilane.testing.worlds import toy_calibration

CONTENTION = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L1 E0
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  launch L1
  76-77  wait L1
  77-78  plan L1
  78-79  launch L1 E0
  79-80  launch L1 E1
  80-81  launch L1
  81-82  launch L-1
  134-135 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E0
  56-61  expert L0 E1
  61-63  combine L0           # 1 + 1
  63-73  attention L1
  73-75  gate L1
  79-84  expert L1 E0
  122-127 expert L1 E1
  127-129 combine L1
  129-133 attention L-1
cpu:
  24-54  expert L0 E2         # 3 tokens: reads a third of the time, less than the half that a copy leaves it
  86-106 expert L1 E2         # 10 of work at 0.5
h2d:
  16-56  demand L0 E1         # 40 of work: the expert draws 0.333 of what one token's would, 0.167 less than at 0.5
  61-61  release L0 E1
  78-122 demand L1 E1         # 78-86 alone is 8, 86-106 at 0.8 is 16, the last 16 alone
  127-127 release L1 E1
d2h:
  13-14  routing L0
  16-24  activations L0       # 8
  75-76  routing L1
  78-86  activations L1
  133-134 routing L-1
"""


def test_copies_and_cpu_experts_slow_each_other_down_while_both_run() -> None:
    # Fiddler: copy 40 + GPU 5 = 45 is less than 5 tokens on the CPU (50), not than 3 (30) or 1 (10).
    spans = play(
        registered("fiddler", calibration=toy_calibration(LAYERS, EXPERTS, TOP_K)),
        step({0: 4, 1: 5, 2: 3}, {0: 6, 1: 5, 2: 1}),
        cache_bytes=200,
        popularity=((0.6, 0.3, 0.1), (0.5, 0.3, 0.2)),
        costs=uniform_costs(cpu_ns=10, copy_ns=40, activations_ns=8, cpu_permille=500, copy_permille=800),
    )
    assert told(spans, CONTENTION) == lines(CONTENTION)


QUEUED_RESULT = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  launch L1
  78-79  wait L1
  79-80  plan L1
  80-81  launch L1 E0
  81-82  launch L1 E1
  82-83  launch L1
  83-84  launch L-1
  131-132 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  36-41  expert L0 E0
  59-64  expert L0 E1
  64-65  combine L0           # the result came over the link: nothing to read in place
  65-75  attention L1
  75-77  gate L1
  100-105 expert L1 E0
  120-125 expert L1 E1
  125-126 combine L1
  126-130 attention L-1
cpu:
  17-24  expert L0 E2
h2d:
  16-36  demand L0 E0 ready=16
  36-39  result L0 ready=24 bytes=24   # computed 24, waits for the running copy, goes before the queued one; 3
  39-59  demand L0 E1 ready=16
  41-41  release L0 E0
  64-64  release L0 E1
  80-100 demand L1 E0
  100-120 demand L1 E1
  105-105 release L1 E0
  125-125 release L1 E1
d2h:
  13-14  routing L0
  16-17  activations L0
  77-78  routing L1
  130-131 routing L-1
"""


def test_a_queued_result_waits_for_the_running_copy_and_for_no_other() -> None:
    spans = play(
        registered("fiddler", calibration=toy_calibration(LAYERS, EXPERTS, TOP_K)),
        step({0: 6, 1: 5, 2: 1}, {0: 6, 1: 6}),  # 5 and 6 tokens are loaded (25 < 35), 1 is not
        cache_bytes=0,
        popularity=((0.6, 0.3, 0.1), (0.5, 0.3, 0.2)),
        costs=uniform_costs(result_path="h2d", result_ns=3),
    )
    assert told(spans, QUEUED_RESULT) == lines(QUEUED_RESULT)


def test_a_load_is_ready_when_it_is_planned_and_its_staging_slot_free_even_if_the_lane_is_busy_then() -> None:
    expected = """
    h2d:
      16-36  demand L0 E0 ready=16
      36-56  demand L0 E1 ready=16
      41-41  release L0 E0    # expert 36-41
      56-76  demand L0 E2 ready=41   # planned 16, the slot of 0 is free 41, the lane 56
      61-61  release L0 E1
      81-81  release L0 E2
      97-117 demand L1 E0     # combine 81-82, attention 82-92, plan 96-97
      117-137 demand L1 E1
      122-122 release L1 E0
      142-142 release L1 E1
    """
    spans = play(registered("on-demand"), step({0: 3, 1: 3, 2: 2}, {0: 4, 1: 4}), cache_bytes=0)
    assert told(lane(spans, "h2d"), expected) == lines(expected)


# --- Whole timelines worked out by hand -------------------------------------------------------------------------------


WRITTEN_BACK = """
h2d, step -1:
  0-0    place L0 E1          # two slots a layer, and the last two experts in them
  0-0    place L0 E2
  0-0    place L1 E1
  0-0    place L1 E2
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E1         # what is there comes first
  17-18  launch L0 E0
  18-19  launch L0
  19-20  launch L1
  62-63  wait L1
  63-64  plan L1
  64-65  launch L1 E2
  65-66  launch L1 E0
  66-67  launch L1
  67-68  launch L-1
  110-111 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E1
  36-41  expert L0 E0 ready=36
  41-42  combine L0
  42-52  attention L1
  52-54  gate L1
  65-70  expert L1 E2
  84-89  expert L1 E0 ready=84
  89-90  combine L1
  90-94  attention L-1
h2d:
  16-16  evict L0 E2          # 1 is in use
  16-36  demand L0 E0 ready=16
  64-64  evict L1 E1
  64-84  demand L1 E0 ready=64
d2h:
  13-14  routing L0
  16-61  writeback L0 E2 ready=16 bytes=100   # begins with the copy that displaces it, on its own lane
  61-62  routing L1 ready=54  # computed 54, behind the write-back
  64-109 writeback L1 E1 ready=64
  109-110 routing L-1 ready=94   # the chosen tokens wait, too

host, step 1:
  111-112 launch L0
  125-126 wait L0
  126-127 plan L0
  127-128 launch L0 E1
  128-129 launch L0 E2
  129-130 launch L0
  130-131 launch L1
  173-174 wait L1
  174-175 plan L1
  175-176 launch L1 E0
  176-177 launch L1 E2
  177-178 launch L1
  178-179 launch L-1
  192-193 wait L-1
gpu, step 1:
  112-122 attention L0
  122-124 gate L0
  128-133 expert L0 E1
  147-152 expert L0 E2
  152-153 combine L0
  153-163 attention L1
  163-165 gate L1
  176-181 expert L1 E0
  181-186 expert L1 E2
  186-187 combine L1
  187-191 attention L-1
h2d, step 1:
  127-127 evict L0 E0
  127-147 demand L0 E2
d2h, step 1:
  124-125 routing L0
  127-172 writeback L0 E0
  172-173 routing L1 ready=165
  191-192 routing L-1         # layer 1 has both its experts: nobody leaves, nothing is written
"""
DEMAND = (step({0: 1, 1: 1}, {0: 1, 2: 1}), step({1: 1, 2: 1}, {0: 1, 2: 1}, index=1))
TABLE = uniform_costs()
SLOW_BACK = replace(TABLE, experts=tuple(costs._replace(writeback_ns=45) for costs in TABLE.experts))


def alongside() -> Composition:
    """Mixtral-Offloading with victims written back alongside the copies that displace them."""
    return replace(registered("mixtral-offloading@impl"), writes_back="alongside")


def test_victims_are_written_back_alongside_the_copies_that_displace_them() -> None:
    spans = play(alongside(), *DEMAND, cache_bytes=400, costs=SLOW_BACK)
    assert told(spans, WRITTEN_BACK) == lines(WRITTEN_BACK)


def test_without_writing_back_the_first_step_ends_sooner() -> None:
    policy = replace(alongside(), writes_back="never")
    spans = play(policy, DEMAND[0], cache_bytes=400, costs=SLOW_BACK)
    # layer 1's routing here at 55, planned 57, 0 loaded 77, computed 82, combined 83, head 87, here 88, waited 89
    assert max(span.end_ns for span in spans) == 89
    assert not [span for span in spans if span.kind == "writeback"]


BOTH_WAYS = """
h2d, step -1:
  0-0    place L0 E1
  0-0    place L0 E2
  0-0    place L1 E1
  0-0    place L1 E2
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E1
  17-18  launch L0 E0
  18-19  launch L0
  19-20  launch L1
  75-76  wait L1
  76-77  plan L1
  77-78  launch L1 E2
  78-79  launch L1 E0
  79-80  launch L1
  80-81  launch L-1
  128-129 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E1
  56-61  expert L0 E0
  61-62  combine L0
  62-72  attention L1
  72-74  gate L1
  78-83  expert L1 E2
  117-122 expert L1 E0
  122-123 combine L1
  123-127 attention L-1
h2d:
  16-16  evict L0 E2
  16-56  demand L0 E0         # 20 by itself
  77-77  evict L1 E1
  77-117 demand L1 E0
d2h:
  13-14  routing L0
  16-66  writeback L0 E2      # 40 of these 50 next to the copy, which do 20 of 30
  74-75  routing L1
  77-127 writeback L1 E1
  127-128 routing L-1
"""


def test_a_copy_and_the_write_back_that_makes_room_for_it_slow_each_other_down() -> None:
    costs = uniform_costs(writeback_ns=30, both_ways_permille=500)
    spans = play(alongside(), DEMAND[0], cache_bytes=400, costs=costs)
    assert told(spans, BOTH_WAYS) == lines(BOTH_WAYS)
