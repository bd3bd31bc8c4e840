"""Whole timelines worked out by hand: on-demand, layer-wise and Fiddler. Notation and costs: ``hand_worked``.

Every layer begins alike: launch, attention (10), gate (2), routing (1), wait (1), plan (1); so a layer whose attention
starts at t has its plan at t + 15. The host goes on to the next layer's launch as soon as it has launched combine.
"""

from __future__ import annotations

from dataclasses import replace

from policies.parts.assigners import LoadAll
from policies.parts.caches import StaticCache
from policies.protocols import Composition
from tests.kit.hand_worked import EXPERTS, LAYERS, TOP_K, Placed, lines, play, registered, step, told
from tests.kit.toys import uniform_costs
from trilane.testing.worlds import toy_calibration

ON_DEMAND = """
host:
  0-1    launch L0
  14-15  wait L0              # routing here at 14
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0            # combine
  19-20  launch L1            # the host runs ahead: layer 0 ends at 62 only
  75-76  wait L1
  76-77  plan L1
  77-78  launch L1 E1
  78-79  launch L1 E2
  79-80  launch L1
  80-81  launch L-1           # LM head
  128-129 wait L-1            # the chosen tokens are here at 128; the step ends at 129
gpu:
  1-11   attention L0         # launched 1
  11-13  gate L0
  36-41  expert L0 E0 ready=36   # launched 17, copied 36
  56-61  expert L0 E1 ready=56   # launched 18, copied 56
  61-62  combine L0           # launched 19, experts 61
  62-72  attention L1         # launched 20, layer 0 over at 62
  72-74  gate L1
  97-102 expert L1 E1 ready=97
  117-122 expert L1 E2 ready=117
  122-123 combine L1
  123-127 attention L-1       # head, 4
h2d:
  16-36  demand L0 E0 ready=16 bytes=100   # planned 16; takes the layer's free cache slot
  36-56  demand L0 E1 ready=16   # lane free 36; the slot is promised to 0, which is pinned: through staging
  61-61  release L0 E1        # its GPU span is over
  77-97  demand L1 E1         # the free cache slot of layer 1
  97-117 demand L1 E2         # through staging
  122-122 release L1 E2
d2h:
  13-14  routing L0 bytes=48  # one token
  74-75  routing L1
  127-128 routing L-1 bytes=4

host, step 1:
  129-130 launch L0           # not before the end of step 0
  143-144 wait L0
  144-145 plan L0
  145-146 launch L0 E1
  146-147 launch L0 E2
  147-148 launch L0
  148-149 launch L1
  204-205 wait L1
  205-206 plan L1
  206-207 launch L1 E1        # what is there comes first
  207-208 launch L1 E0
  208-209 launch L1
  209-210 launch L-1
  237-238 wait L-1
gpu, step 1:
  130-140 attention L0
  140-142 gate L0
  165-170 expert L0 E1
  185-190 expert L0 E2
  190-191 combine L0
  191-201 attention L1
  201-203 gate L1
  207-212 expert L1 E1 ready=207   # resident since step 0: launched 207, under the copy of 0
  226-231 expert L1 E0 ready=226
  231-232 combine L1
  232-236 attention L-1
h2d, step 1:
  145-145 evict L0 E0         # the least recently used, and the only one not pinned, leaves as the copy starts
  145-165 demand L0 E1        # into its slot
  165-185 demand L0 E2        # through staging: 1 is pinned
  190-190 release L0 E2
  206-226 demand L1 E0        # through staging: the only resident, 1, is in use
  231-231 release L1 E0
d2h, step 1:
  142-143 routing L0
  203-204 routing L1
  236-237 routing L-1
"""


def test_on_demand_evicts_the_least_recent_and_loads_the_rest_through_staging() -> None:
    spans = play(
        registered("on-demand"),
        step({0: 1, 1: 1}, {1: 1, 2: 1}),
        step({1: 1, 2: 1}, {0: 1, 1: 1}, index=1),
        cache_bytes=200,  # one slot a layer
    )
    assert told(spans, ON_DEMAND) == lines(ON_DEMAND)


SERIAL_COPIES = """
gpu:
  1-11   attention L0
  11-13  gate L0
  36-41  expert L0 E0
  61-66  expert L0 E1         # not from 56: its copy began when E0 had run
  66-67  combine L0
  67-77  attention L1
  77-79  gate L1
  83-88  expert L1 E1         # resident, launched 82-83: it runs first, and nothing is copied meanwhile
  108-113 expert L1 E2
  113-114 combine L1
  114-118 attention L-1
h2d:
  16-36  demand L0 E0 ready=16
  41-41  release L0 E0
  41-61  demand L0 E1 ready=16   # the link is idle from 36 to 41, though there is another slot
  66-66  release L0 E1
  88-108 demand L1 E2
  113-113 release L1 E2
"""


def test_serial_copies_take_turns_with_the_gpu() -> None:
    placed = Placed(((), (1,)))
    policy = Composition(placement=placed, assigner=LoadAll(), cache=StaticCache(), demand_slots=2)
    costs = replace(uniform_costs(), serial_copies=True)
    spans = play(policy, step({0: 1, 1: 1}, {1: 1, 2: 1}), cache_bytes=placed.bytes, costs=costs)
    shown = [span for span in spans if span.lane in ("gpu", "h2d") and span.kind not in ("place", "evict")]
    assert told(shown, SERIAL_COPIES) == lines(SERIAL_COPIES)


NO_SLOTS = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  launch L1
  80-81  wait L1
  81-82  plan L1
  82-83  launch L1 E1
  83-84  launch L1 E2
  84-85  launch L1
  85-86  launch L-1
  138-139 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  36-41  expert L0 E0
  61-66  expert L0 E1
  66-67  combine L0
  67-77  attention L1
  77-79  gate L1
  102-107 expert L1 E1
  127-132 expert L1 E2
  132-133 combine L1
  133-137 attention L-1
h2d:
  16-36  demand L0 E0 ready=16   # takes the one staging slot
  41-41  release L0 E0
  41-61  demand L0 E1 ready=41   # asked for at 16, the slot is free at 41: the link rests 36-41
  66-66  release L0 E1
  82-102 demand L1 E1 ready=82
  107-107 release L1 E1
  107-127 demand L1 E2 ready=107
  132-132 release L1 E2
d2h:
  13-14  routing L0
  79-80  routing L1
  137-138 routing L-1
"""


def test_without_cache_slots_all_experts_pass_through_the_one_staging_slot() -> None:
    demand = step({0: 1, 1: 1}, {1: 1, 2: 1})
    spans = play(registered("on-demand", demand_slots=1), demand, cache_bytes=0)
    assert told(spans, NO_SLOTS) == lines(NO_SLOTS)


LAYER_WISE = """
h2d, step -1:
  0-0    place L1 E0          # 300 bytes hold the last layer
  0-0    place L1 E1
  0-0    place L1 E2
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0            # combine; nothing else to launch
  17-18  launch L1
  51-52  wait L1
  52-53  plan L1
  53-54  launch L1 E0
  54-55  launch L1 E1
  55-56  launch L1
  56-57  launch L-1
  70-71  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  35-38  combine L0 ready=35  # launched 17, CPU done 35; 1 + 2 for reading the result in place
  38-48  attention L1
  48-50  gate L1
  54-59  expert L1 E0         # launched 54
  59-64  expert L1 E1         # launched 55, gpu free 59
  64-65  combine L1           # no result to read: 1
  65-69  attention L-1
cpu:
  18-28  expert L0 E0 ready=18 tokens=1 bytes=100   # activations here at 18; 7 + 3 for the first of the layer
  28-35  expert L0 E2 ready=18   # cpu free 28; 7
d2h:
  13-14  routing L0
  16-18  activations L0 ready=16 bytes=4   # planned 16; 2
  50-51  routing L1
  69-70  routing L-1
"""


def test_layer_wise_runs_one_layer_on_the_cpu_and_one_on_the_gpu() -> None:
    costs = uniform_costs(first_cpu_ns=3, activations_ns=2, result_ns=2)
    spans = play(registered("layer-wise"), step({0: 1, 2: 1}, {0: 1, 1: 1}), cache_bytes=300, costs=costs)
    assert told(spans, LAYER_WISE) == lines(LAYER_WISE)


FIDDLER = """
h2d, step -1:
  0-0    place L0 E0          # 200 bytes hold the two most popular of the model
  0-0    place L1 E0
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  launch L1
  56-57  wait L1
  57-58  plan L1
  58-59  launch L1 E0
  59-60  launch L1 E2
  60-61  launch L1
  61-62  launch L-1
  91-92  wait L-1
gpu:
  1-11   attention L0 tokens=6
  11-13  gate L0
  17-22  expert L0 E0 tokens=6   # resident
  36-41  expert L0 E1 tokens=5 ready=36
  41-43  combine L0           # the last part, 1, is over at 41, the CPU's at 28; 1 + 1 for the result
  43-53  attention L1
  53-55  gate L1
  59-64  expert L1 E0
  78-83  expert L1 E2 ready=78
  84-86  combine L1 ready=84  # here the CPU is last
  86-90  attention L-1
cpu:
  17-28  expert L0 E2 ready=17 tokens=1   # 7 + 4 for the first, while 1 is being copied
  59-84  expert L1 E1 tokens=3   # 21 + 4
h2d:
  16-36  demand L0 E1         # 5 tokens: copy 20 + GPU 5 = 25 < 35 on the CPU
  41-41  release L0 E1        # not kept
  58-78  demand L1 E2         # 5 tokens again; 3 tokens take 21 < 25 on the CPU (the first one's 4 do not count)
  83-83  release L1 E2
d2h:
  13-14  routing L0 bytes=288   # 6 tokens x 48
  16-17  activations L0 bytes=24   # 6 x 4
  55-56  routing L1
  58-59  activations L1
  90-91  routing L-1 bytes=24
"""


def test_fiddler_loads_the_busy_expert_while_the_cpu_computes_the_idle_one() -> None:
    spans = play(
        registered("fiddler", calibration=toy_calibration(LAYERS, EXPERTS, TOP_K)),
        step({0: 6, 1: 5, 2: 1}, {0: 4, 1: 3, 2: 5}, phase="prefill"),
        cache_bytes=200,
        popularity=((0.6, 0.3, 0.1), (0.5, 0.3, 0.2)),
        costs=uniform_costs(first_cpu_ns=4),
    )
    assert told(spans, FIDDLER) == lines(FIDDLER)
