"""Whole timelines worked out by hand: DALI, greedy and exact. Notation and costs: ``hand_worked``."""

from __future__ import annotations

from dataclasses import replace

from policies.mechanism.views import Forecast
from tests.kit.hand_worked import Placed, lane, lines, play, registered, step, told

DALI = """
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
  19-20  foresee L0           # the forecast is here at 16, the host has launched at 19
  20-21  launch L1
  56-57  wait L1
  57-58  plan L1
  58-59  launch L1 E2
  59-60  launch L1 E0
  60-61  launch L1
  61-62  launch L-1           # no layer follows, so no foresee
  76-77  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  13-15  speculate L0 >1
  17-22  expert L0 E0
  36-41  expert L0 E1 ready=36
  41-43  combine L0           # 1 over at 41, the CPU at 31; 1 + 1
  43-53  attention L1
  53-55  gate L1
  59-64  expert L1 E2 ready=59   # prefetched: here since 56
  64-69  expert L1 E0         # launched 60, gpu free 64
  69-71  combine L1           # CPU over at 66; 1 + 1
  71-75  attention L-1
cpu:
  17-31  expert L0 E2         # activations 17, 2 tokens
  59-66  expert L1 E1         # 1 token
h2d:
  16-36  demand L0 E1 ready=16   # staging: the window cache admits no loads
  41-41  release L0 E1
  36-56  prefetch L1 E2 ready=20   # foreseen 20, after the demand load
  43-43  evict L0 E0          # end of layer 0: it wants its busiest absent expert (1: 4 tokens) for resident 0 (2),
  43-43  place L0 E1          # and 1 still lies in the staging slot that it was computed from: no copy
  64-64  release L1 E2
  71-71  evict L1 E0          # end of layer 1: 2 (4 tokens) for 0 (3), from the slot that it was prefetched into
  71-71  place L1 E2
d2h:
  13-14  routing L0
  15-16  routing L0 >1 ready=15   # the forecast, computed 15; before the activations
  16-17  activations L0 ready=16
  55-56  routing L1
  58-59  activations L1
  75-76  routing L-1
"""


def test_dali_splits_greedily_uses_a_prefetch_and_swaps_at_the_end_of_each_layer() -> None:
    # Layer 0, (t_gpu, t_cpu): 0 (5, 14), 1 (20, 28), 2 (20, 14). By difference 9, 8, 6:
    # 0 to the GPU (5 <= 14), 1 to the GPU (25 <= 28), 2 to the CPU (45 > 14).
    # Layer 1: 0 (5, 21), 1 (20, 7), 2 (5, 28), since 2 has been prefetched. By difference 23, 16, 13:
    # 2 to the GPU (5 <= 28), 0 to the GPU (10 <= 21), 1 to the CPU (30 > 7).
    placed = Placed(((0,), (0,)))
    policy = replace(registered("dali", window=1, update=1, prefetch=1), placement=placed)
    guess = Forecast(1, "residual", (2, 0, 1), (4, 3, 1))  # of the absent, 2 is the busiest
    demand = step({0: 2, 1: 4, 2: 2}, {0: 3, 1: 1, 2: 4}, forecast=guess)
    spans = play(policy, demand, cache_bytes=placed.bytes)
    assert told(spans, DALI) == lines(DALI)


DALI_ILP = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L1 E0
  0-0    place L1 E1
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E2
  18-19  launch L0
  19-20  launch L1            # no prefetches, so no foresee
  56-57  wait L1
  57-58  plan L1
  58-59  launch L1 E0
  59-60  launch L1 E1
  60-61  launch L1
  61-62  launch L-1
  75-76  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E0
  36-41  expert L0 E2 ready=36
  41-43  combine L0           # CPU over at 38
  43-53  attention L1
  53-55  gate L1
  59-64  expert L1 E0
  64-69  expert L1 E1
  69-70  combine L1
  70-74  attention L-1
cpu:
  17-38  expert L0 E1         # 3 tokens
h2d:
  16-36  demand L0 E2
  41-41  release L0 E2
d2h:
  13-14  routing L0
  16-17  activations L0
  55-56  routing L1
  74-75  routing L-1
"""
# Layer 0, (t_gpu, t_cpu): 0 (5, 7), 1 (20, 21), 2 (20, 28).
# Greedy, by difference 8, 2, 1: 2 to the GPU (20 <= 28), 0 to the CPU (25 > 7), 1 to the CPU (40 > 28): makespan 28.
# Exact: 0 and 2 to the GPU, 1 to the CPU: max(25, 21) = 25. The other splits take 26 or more.
# Layer 1: 0 and 1 (5, 28): both on the GPU, 10.
UNEVEN = step({0: 1, 1: 3, 2: 4}, {0: 4, 1: 4})


def test_dali_ilp_finds_the_split_that_greedy_misses() -> None:
    placed = Placed(((0,), (0, 1)))
    policy = replace(registered("dali-ilp", prefetch=0), placement=placed)
    spans = play(policy, UNEVEN, cache_bytes=placed.bytes)
    assert told(spans, DALI_ILP) == lines(DALI_ILP)


def test_greedy_takes_the_longer_way_on_the_same_layer() -> None:
    placed = Placed(((0,), (0, 1)))
    policy = replace(registered("dali", prefetch=0), placement=placed)
    spans = play(policy, UNEVEN, cache_bytes=placed.bytes)
    expected = """
    cpu:
      17-24 expert L0 E0      # in the order of the differences: 1 token
      24-45 expert L0 E1      # 3 tokens, over at 45 where the exact split has 38
    """
    assert told(lane(spans, "cpu"), expected) == lines(expected)
    (combine,) = (span for span in spans if span.kind == "combine" and span.layer == 0)
    assert (combine.ready_ns, combine.end_ns) == (45, 47)
