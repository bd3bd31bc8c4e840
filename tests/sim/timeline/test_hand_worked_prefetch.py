"""Timelines worked out by hand: prefetches late, wasted, withdrawn, a swap behind one. Notation: ``hand_worked``."""

from __future__ import annotations

from typing import Any

from policies.mechanism.views import Forecast
from policies.papers.dali.parts import WindowCache
from policies.parts.assigners import LoadAll
from policies.parts.caches import StaticCache
from policies.parts.prefetchers import TopPrefetcher
from policies.protocols import Composition, Needs
from tests.kit.hand_worked import Placed, lane, lines, play, step, told
from tests.kit.toys import uniform_costs


def looking_ahead(placed: Placed, **parts: Any) -> Composition:
    """Loads everything, prefetches up to two experts into staging, and keeps what was placed."""
    given: dict[str, Any] = {"cache": StaticCache(), "prefetch_slots": 2, **parts}
    return Composition(
        placement=placed, assigner=LoadAll(), prefetcher=TopPrefetcher(2, "gate", "staging"),
        needs=Needs(forecasts=(("gate", 1),)), **given,
    )


PLACED = Placed(((0, 1), (0,)))
DEMAND = ({0: 1, 1: 1}, {0: 1, 2: 1})  # layer 1 will miss 2
PREFETCH: dict[str, Any] = {"cache_bytes": PLACED.bytes, "costs": uniform_costs(copy_ns=40)}
FIRST_LAYER = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L0 E1
  0-0    place L1 E0
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  foresee L0
  20-21  launch L1
  41-42  wait L1
  42-43  plan L1
  43-44  launch L1 E0
  44-45  launch L1 E2
  45-46  launch L1
  46-47  launch L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  13-15  speculate L0 >1
  17-22  expert L0 E0
  22-27  expert L0 E1
  27-28  combine L0
  28-38  attention L1
  38-40  gate L1
  44-49  expert L1 E0
d2h:
  13-14  routing L0
  15-16  routing L0 >1
  40-41  routing L1
"""

WASTED = FIRST_LAYER + """
host:
  111-112 wait L-1
gpu:
  100-105 expert L1 E2 ready=100
  105-106 combine L1
  106-110 attention L-1
h2d:
  20-60  prefetch L1 E1 ready=20   # runs when layer 1 is routed at 42, and layer 1 has no use for it
  60-60  release L1 E1        # wasted: leaves as it arrives
  60-100 demand L1 E2 ready=43   # its prefetch was still queued at 42: a demand load, from the plan's end on
  105-105 release L1 E2
d2h:
  110-111 routing L-1
"""


def test_a_running_prefetch_that_nobody_needs_is_wasted_and_a_queued_one_becomes_a_demand_load() -> None:
    demand = step(*DEMAND, forecast=Forecast(1, "gate", (1, 2), (1, 1)))
    assert told(play(looking_ahead(PLACED), demand, **PREFETCH), WASTED) == lines(WASTED)


LATE = FIRST_LAYER + """
host:
  71-72  wait L-1
gpu:
  60-65  expert L1 E2 ready=60   # launched 45, awaited until 60
  65-66  combine L1
  66-70  attention L-1
h2d:
  20-60  prefetch L1 E2 ready=20   # runs when layer 1 is routed: late
  42-42  withdraw L1 E1 >1    # still queued as its plan begins, and layer 1 has no use for it
  65-65  release L1 E2
d2h:
  70-71  routing L-1
"""


def test_a_running_prefetch_is_awaited_and_a_queued_one_that_nobody_needs_is_withdrawn() -> None:
    demand = step(*DEMAND, forecast=Forecast(1, "gate", (2, 1), (1, 1)))
    assert told(play(looking_ahead(PLACED), demand, **PREFETCH), LATE) == lines(LATE)


def test_a_swap_is_ready_at_the_end_of_the_layer_that_asked_for_it_however_long_the_lane_is_busy() -> None:
    # Timeline of FIRST_LAYER: layer 0 ends at 28, layer 1 (both experts resident) at 55, the step at 61.
    expected = """
    h2d, step -1:
      0-0    place L0 E0
      0-0    place L0 E1
      0-0    place L1 E0
      0-0    place L1 E2
    h2d:
      20-100 prefetch L1 E1 ready=20   # wasted
      100-100 release L1 E1
      100-100 evict L0 E0     # 2 for the lower of two equals; layer 1 would swap in 1, which is under way
      100-180 swap L0 E2 ready=28
    """
    placed = Placed(((0, 1), (0, 2)))
    policy = looking_ahead(placed, cache=WindowCache(2, 3, 1, 1))
    demand = step(*DEMAND, forecast=Forecast(1, "gate", (1,), (2,)))
    spans = play(policy, demand, cache_bytes=placed.bytes, costs=uniform_costs(copy_ns=80))
    assert told(lane(spans, "h2d"), expected) == lines(expected)
