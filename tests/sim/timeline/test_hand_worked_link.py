"""Timelines worked out by hand: shared DRAM, queued results, full staging. Notation and costs: ``hand_worked``."""

from __future__ import annotations

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
