"""A forecast that is half wrong, worked out by hand: executed as it is, and repaired. Notation: ``hand_worked``.

One decode step with two buffers of two experts; a copy takes 30 ns. Layer 0 is routed to 0 and 1. For layer 1 the gate
on layer 0's input forecasts 0 and 1, its own router chooses 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from policies.mechanism.views import Forecast
from policies.protocols import Composition
from policies.registry import BuildContext, compose
from sim.runs.demand import StepDemand
from tests.kit.hand_worked import EXPERTS, LAYERS, TOP_K, Placed, lane, lines, play, registered, step, told
from tests.kit.toys import uniform_costs

STEP = step({0: 1, 1: 1}, {1: 1, 2: 1}, forecast=Forecast(1, "gate", (0, 1), (1, 1), ((0, 1, 2),)))
COSTS = uniform_costs(copy_ns=30)
CONTEXT = BuildContext("toy", EXPERTS, LAYERS, top_k=TOP_K)

LAYER_0 = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  foresee L0           # the forecast is here at 16, the host has launched at 19
  20-21  launch L1
gpu:
  1-11   attention L0
  11-13  gate L0
  13-15  speculate L0 >1
  46-51  expert L0 E0 ready=46
  76-81  expert L0 E1 ready=76
  81-82  combine L0
d2h:
  13-14  routing L0
  15-16  routing L0 >1
h2d:
  16-46  demand L0 E0 ready=16   # the first layer of a step is copied when it has been routed
  46-76  demand L0 E1 ready=16
  51-51  release L0 E0
  81-81  release L0 E1
  76-106 prefetch L1 E0 ready=20   # the other buffer fills while layer 0 ends and layer 1 begins
"""

SPECULATIVE = LAYER_0 + """
host:
  82-83  plan L1              # committed: no gate, no routing, no wait; ready when layer 0 has ended
  83-84  launch L1 E0
  84-85  launch L1 E1
  85-86  launch L1
  86-87  launch L-1
  147-148 wait L-1
gpu:
  82-92  attention L1
  106-111 expert L1 E0 ready=106
  136-141 expert L1 E1 ready=136
  141-142 combine L1
  142-146 attention L-1
h2d:
  106-136 demand L1 E1 ready=83   # its prefetch was still queued at 82, when layer 1 was planned
  111-111 release L1 E0
  141-141 release L1 E1
d2h:
  146-147 routing L-1
"""


def test_a_speculative_step_executes_its_mistake_and_loses_no_time() -> None:
    spans = play(compose("router-pf", context=CONTEXT), STEP, costs=COSTS)
    assert told(spans, SPECULATIVE) == lines(SPECULATIVE)


@pytest.mark.parametrize(("policy", "kind", "ns"), [("quasi-pf", "quasi_hidden", 2), ("est-pf", "estimator", 3)])
def test_an_estimator_has_its_own_cost(policy: str, kind: str, ns: int) -> None:
    forecast = Forecast(1, kind, (0, 1), (1, 1), ((0, 1, 2),))
    spans = play(compose(policy, context=CONTEXT), step({0: 1, 1: 1}, {1: 1, 2: 1}, forecast=forecast), costs=COSTS)
    assert [span.end_ns - span.start_ns for span in spans if span.kind == "speculate"] == [ns]


EXACT = LAYER_0 + """
host:
  95-96  wait L1
  96-97  plan L1
  97-98  launch L1 E1
  98-99  launch L1 E2
  99-100 launch L1
  100-101 launch L-1
  177-178 wait L-1
gpu:
  82-92  attention L1
  92-94  gate L1
  136-141 expert L1 E1 ready=136
  166-171 expert L1 E2 ready=166
  171-172 combine L1
  172-176 attention L-1
h2d:
  106-106 release L1 E0       # wasted: it runs when layer 1 is routed, and leaves as it arrives
  106-136 demand L1 E1 ready=97   # forecast rightly, but its prefetch was still queued at 96
  136-166 demand L1 E2 ready=97   # the miss
  141-141 release L1 E1
  171-171 release L1 E2
d2h:
  94-95  routing L1
  176-177 routing L-1
"""


def test_its_exact_twin_fetches_the_miss_and_pays_one_copy_for_it() -> None:
    spans = play(compose("router-pf@exact", context=CONTEXT), STEP, costs=COSTS)
    assert told(spans, EXACT) == lines(EXACT)


# --- Timelines worked out by hand -------------------------------------------------------------------------------------


def smoe(placed: Placed) -> Composition:
    """Alpha is 0.25."""
    return replace(registered("smoe"), placement=placed)


def one_token(scores: Sequence[Sequence[float]], ranked: Sequence[int], forecast: Sequence[float]) -> StepDemand:
    """A decode step from each layer's scores; layer 0 foresees ``ranked`` in layer 1, with their scores."""
    chosen = [sorted(range(3), key=lambda e, own=own: -own[e])[:2] for own in scores]  # type: ignore[misc]
    guess = Forecast(1, "partial", tuple(ranked[:2]), (1, 1), [ranked], [forecast])
    demand = step(*(dict.fromkeys(ids, 1) for ids in chosen), forecast=guess)
    routings = tuple(
        routing._replace(token_ids=[ids], token_weights=[[own[e] / sum(own[i] for i in ids) for e in ids]])
        for routing, ids, own in zip(demand.routings, chosen, scores, strict=True)
    )
    return demand._replace(routings=routings, scores=np.array([scores]))


LATE = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L1 E1
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  launch L0            # the partial forward pass
  35-36  wait L0 >1           # the forecast comes by itself
  36-37  foresee L0
  37-38  launch L1
  59-60  wait L1
  60-61  plan L1
  61-62  launch L1 E2
  62-63  launch L1 E0
  63-64  launch L1
  64-65  launch L-1
  99-100 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E0
  22-34  speculate L0 >1 ready=20   # after the expert that is here, before the one that is coming: attention 10, gate 2
  40-45  expert L0 E1
  45-46  combine L0
  46-56  attention L1
  56-58  gate L1
  64-69  expert L1 E2 ready=64
  88-93  expert L1 E0 ready=88
  93-94  combine L1
  94-98  attention L-1
h2d:
  16-40  demand L0 E1         # through staging: the only slot holds 0, which is in use
  45-45  release L0 E1
  40-40  evict L1 E1          # the only member of layer 1's cache, and its forecast score is low
  40-64  prefetch L1 E2 ready=37   # behind the demand load
  64-88  demand L1 E0 ready=61   # second in the queue of prefetches, and no room beside 2: copied when it is missed
  93-93  release L1 E0
d2h:
  13-14  routing L0
  34-35  routing L0 >1
  58-59  routing L1
  98-99  routing L-1
"""


def test_the_forecast_comes_after_the_experts_that_are_here_and_prefetches_wait_for_loads() -> None:
    """Copies take 24. Both experts of both layers are top-score (0.3 > 1.25 x 0.2 and x 0.1): nobody is exchanged."""
    placed = Placed(((0,), (1,)))
    demand = one_token([(0.5, 0.3, 0.2), (0.3, 0.1, 0.6)], (2, 0, 1), (0.6, 0.3, 0.1))
    spans = play(smoe(placed), demand, cache_bytes=placed.bytes, costs=uniform_costs(copy_ns=24))
    assert told(spans, LATE) == lines(LATE)


EXCHANGED = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L0 E2
  0-0    place L1 E0
  0-0    place L1 E1
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E0
  22-27  expert L0 E2         # in the place of 1, which is not here
  27-39  speculate L0 >1
  39-40  combine L0
  43-53  attention L1         # the forecast is here at 40, waited for at 41, foresee ends at 42, launched 43
  53-55  gate L1
  59-64  expert L1 E0
  64-69  expert L1 E1
  69-70  combine L1
  70-74  attention L-1
"""


def test_a_low_score_expert_that_misses_is_exchanged_and_nothing_is_copied() -> None:
    """Layer 0: 1 (0.28) is low (at most 1.25 x 0.24), and 2 (0.24 > 0.75 x 0.24) is on the GPU."""
    placed = Placed(((0, 2), (0, 1)))
    demand = one_token([(0.48, 0.28, 0.24), (0.6, 0.3, 0.1)], (0, 1, 2), (0.6, 0.3, 0.1))
    spans = play(smoe(placed), demand, cache_bytes=placed.bytes)
    shown = lane(spans, "gpu") + lane(spans, "cpu") + lane(spans, "h2d")
    assert told(shown, EXCHANGED) == lines(EXCHANGED)


# --- Whole timelines worked out by hand -------------------------------------------------------------------------------


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
