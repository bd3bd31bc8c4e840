"""A forecast that is half wrong, worked out by hand: executed as it is, and repaired. Notation: ``hand_worked``.

One decode step with two buffers of two experts; a copy takes 30 ns. Layer 0 is routed to 0 and 1. For layer 1 the gate
on layer 0's input forecasts 0 and 1, its own router chooses 1 and 2.
"""

from __future__ import annotations

import pytest

from policies.mechanism.views import Forecast
from policies.registry import BuildContext, compose
from tests.kit.hand_worked import EXPERTS, LAYERS, TOP_K, lines, play, step, told
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
