"""Whole timelines worked out by hand: evicted experts written back to the host. Notation: ``hand_worked``.

In the first a write-back lasts 45 and slows nothing down, but holds up what comes over the same lane after it: routing
and chosen tokens. In the second the link carries half as much each way while both are busy.
"""

from __future__ import annotations

from dataclasses import replace

from tests.kit.hand_worked import lines, play, registered, step, told
from tests.kit.toys import uniform_costs

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


def test_mixtral_offloading_as_implemented_writes_its_victims_back() -> None:
    spans = play(registered("mixtral-offloading@impl"), *DEMAND, cache_bytes=400, costs=SLOW_BACK)
    assert told(spans, WRITTEN_BACK) == lines(WRITTEN_BACK)


def test_without_writing_back_the_first_step_ends_sooner() -> None:
    policy = replace(registered("mixtral-offloading@impl"), writes_back=False)
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
    spans = play(registered("mixtral-offloading@impl"), DEMAND[0], cache_bytes=400, costs=costs)
    assert told(spans, BOTH_WAYS) == lines(BOTH_WAYS)
