"""Whole timelines worked out by hand: the clairvoyant run. Notation and costs: ``hand_worked``."""

from __future__ import annotations

from policies.mechanism.views import Forecast
from tests.kit.hand_worked import lane, lines, play, registered, step, told
from tests.kit.toys import uniform_costs

ORACLE = """
h2d, step -1:
  0-0    place L0 E0          # two slots a layer, for those used first
  0-0    place L0 E1
  0-0    place L1 E0
  0-0    place L1 E2
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  foresee L0 ready=14  # known with the routing, launched 19; layer 1 has all that it needs
  20-21  launch L1
  41-42  wait L1
  42-43  plan L1
  43-44  launch L1 E0
  44-45  launch L1 E2
  45-46  launch L1
  46-47  launch L-1           # no layer follows, so no foresee
  60-61  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0              # a perfect forecast costs the GPU nothing, and no copy
  17-22  expert L0 E0
  22-27  expert L0 E1
  27-28  combine L0
  28-38  attention L1
  38-40  gate L1
  44-49  expert L1 E0
  49-54  expert L1 E2
  54-55  combine L1
  55-59  attention L-1
d2h:
  13-14  routing L0
  40-41  routing L1
  59-60  routing L-1

host, step 1:
  61-62  launch L0
  75-76  wait L0
  76-77  plan L0
  77-78  launch L0 E1
  78-79  launch L0 E2
  79-80  launch L0
  80-81  foresee L0
  81-82  launch L1
  116-117 wait L1
  117-118 plan L1
  118-119 launch L1 E1
  119-120 launch L1 E2
  120-121 launch L1
  121-122 launch L-1
  135-136 wait L-1
gpu, step 1:
  62-72  attention L0
  72-74  gate L0
  78-83  expert L0 E1
  97-102 expert L0 E2 ready=97
  102-103 combine L0
  103-113 attention L1
  113-115 gate L1
  119-124 expert L1 E1        # prefetched: here since 117, launched 119
  124-129 expert L1 E2
  129-130 combine L1
  130-134 attention L-1
h2d, step 1:
  77-97  demand L0 E2         # bypass, so staging: the resident 0 is never used again, but neither is 2
  97-97  evict L1 E0          # never used again
  97-117 prefetch L1 E1 ready=81   # used before 0, so it is admitted; foreseen 81, lane free 97
  102-102 release L0 E2
d2h, step 1:
  74-75  routing L0
  115-116 routing L1
  134-135 routing L-1
"""
DEAR_CPU = uniform_costs(cpu_ns=50)  # an expert takes 5 on the GPU, 20 with its copy: two never more than 40


def test_oracle_declines_a_useless_load_and_prefetches_what_comes() -> None:
    first = step({0: 1, 1: 1}, {0: 1, 2: 1}, forecast=Forecast(1, "oracle", (0, 2), (1, 1)))
    second = step({1: 1, 2: 1}, {1: 1, 2: 1}, index=1, forecast=Forecast(1, "oracle", (1, 2), (1, 1)))
    policy = registered("oracle", future=(first, second))
    spans = play(policy, first, second, cache_bytes=400, costs=DEAR_CPU)
    assert told(spans, ORACLE) == lines(ORACLE)


def test_oracle_declines_a_prefetch_that_would_displace_an_expert_of_the_same_layer() -> None:
    expected = """
    h2d, step -1:
      0-0    place L0 E0      # one slot a layer
      0-0    place L1 E0
    h2d:
      16-36  demand L0 E1     # staging: 0 is in use
      36-56  prefetch L1 E2 ready=20   # staging: layer 1 uses 0 and 2, neither is used again
      41-41  release L0 E1
      68-68  release L1 E2    # combine of layer 0 41-42, attention to 52, plan 56-57; 0 runs 58-63, 2 63-68
    """
    demand = step({0: 1, 1: 1}, {0: 1, 2: 1}, forecast=Forecast(1, "oracle", (0, 2), (1, 1)))
    spans = play(registered("oracle", future=[demand]), demand, cache_bytes=200, costs=DEAR_CPU)
    assert told(lane(spans, "h2d"), expected) == lines(expected)
