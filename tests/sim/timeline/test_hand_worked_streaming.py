"""Whole timelines worked out by hand: experts copied for nobody, as DeepSpeed does. Notation: ``hand_worked``.

Attention 30, gate 5, copy 30: a layer whose attention starts at t has its plan at t + 38.
"""

from __future__ import annotations

from policies.mechanism.views import Assignment, LayerView
from policies.parts.caches import StaticCache
from policies.protocols import Composition
from sim.runs.spans import spans_frame
from sim.runs.stalls import Stalls, stalls_of
from tests.kit.hand_worked import Placed, lane, lines, play, registered, step, told
from tests.kit.toys import uniform_costs

COSTS = uniform_costs(attention_ns=30, gate_ns=5, copy_ns=30)
STREAMED = """
host:
  0-1    launch L0
  37-38  wait L0
  38-39  plan L0
  39-40  launch L0 E0
  40-41  launch L0 E1
  41-42  launch L0
  42-43  foresee L0 ready=37  # nothing is forecast: all of layer 1 comes next
  43-44  launch L1
  171-172 wait L1
  172-173 plan L1
  173-174 launch L1 E0
  174-175 launch L1 E1
  175-176 launch L1
  176-177 launch L-1
  225-226 wait L-1
gpu:
  1-31   attention L0
  31-36  gate L0
  99-104 expert L0 E0 ready=99
  129-134 expert L0 E1 ready=129
  134-135 combine L0 ready=69   # 2 was there at 69, the experts keep it until 134
  135-165 attention L1
  165-170 gate L1
  174-179 expert L1 E0 ready=174   # prefetched, here since 159
  189-194 expert L1 E1 ready=189   # its prefetch was running when layer 1 was planned
  219-220 combine L1 ready=219   # all experts are computed at 194, but 2 belongs to the layer
  220-224 attention L-1
h2d:
  39-69  demand L0 E2 ready=39 bytes=100   # nobody needs it, and it comes first
  69-69  release L0 E2        # its slot is free at once
  69-99  demand L0 E0 ready=39
  99-129 demand L0 E1 ready=39   # the second slot
  104-104 release L0 E0
  134-134 release L0 E1
  129-159 prefetch L1 E0 ready=43
  159-189 prefetch L1 E1 ready=43
  179-179 release L1 E0
  194-194 release L1 E1
  189-219 demand L1 E2 ready=173   # still a queued prefetch at 172; streamed from the plan's end on
  219-219 release L1 E2
d2h:
  36-37  routing L0
  170-171 routing L1
  224-225 routing L-1

host, step 1:
  226-227 launch L0
  263-264 wait L0
  264-265 plan L0
  265-266 launch L0 E0
  266-267 launch L0 E2
  267-268 launch L0
  268-269 foresee L0
  269-270 launch L1
  397-398 wait L1
  398-399 plan L1
  399-400 launch L1 E1
  400-401 launch L1 E2
  401-402 launch L1
  402-403 launch L-1
  456-457 wait L-1
gpu, step 1:
  227-257 attention L0
  257-262 gate L0
  325-330 expert L0 E0
  355-360 expert L0 E2
  360-361 combine L0 ready=295
  361-391 attention L1
  391-396 gate L1
  415-420 expert L1 E1 ready=415
  445-450 expert L1 E2 ready=445
  450-451 combine L1 ready=402   # nothing is streamed: 0 had come before the plan
  451-455 attention L-1
h2d, step 1:
  265-295 demand L0 E1        # layer 0 of every step comes from the start
  295-295 release L0 E1
  295-325 demand L0 E0
  325-355 demand L0 E2
  330-330 release L0 E0
  360-360 release L0 E2
  355-385 prefetch L1 E0 ready=269
  385-415 prefetch L1 E1 ready=269
  398-398 release L1 E0       # here, and of no use: wasted, and not brought again
  420-420 release L1 E1
  415-445 demand L1 E2 ready=399
  450-450 release L1 E2
d2h, step 1:
  262-263 routing L0
  396-397 routing L1
  455-456 routing L-1
"""
TWO_STEPS = step({0: 1, 1: 1}, {0: 1, 1: 1}), step({0: 1, 2: 1}, {1: 1, 2: 1}, index=1)


def test_deepspeed_brings_every_expert_and_the_next_layer_ahead() -> None:
    spans = play(registered("deepspeed"), *TWO_STEPS, costs=COSTS)
    assert told(spans, STREAMED) == lines(STREAMED)


def test_waiting_for_a_streamed_expert_is_charged_to_the_link() -> None:
    # h2d: 36-99, 104-129, 179-189, 194-219 (the streamed one) and 262-325, 330-355, 396-415, 420-445 = 123 + 132.
    # host: 0-1, 170-174, 224-227, 455-457 = 10. Busy: 2 steps x (2 layers x 46 + 4) = 192, of 457.
    spans = play(registered("deepspeed"), *TWO_STEPS, costs=COSTS)
    assert stalls_of(spans_frame([tuple(s) for s in spans])) == Stalls(h2d_ns=255, cpu_ns=0, host_ns=10)  # type: ignore[misc]


def test_a_running_prefetch_of_an_idle_expert_is_wasted_and_not_waited_for() -> None:
    # Attention 10, gate 2: layer 0 is planned at 16, its copies end at 46, 76, 106, it ends at 112; layer 1 is routed
    # at 126 while its expert 0, which nobody needs, is on its way.
    expected = """
    h2d:
      16-46   demand L0 E1
      46-46   release L0 E1
      46-76   demand L0 E0
      76-106  demand L0 E2
      81-81   release L0 E0
      106-136 prefetch L1 E0 ready=20
      111-111 release L0 E2
      136-136 release L1 E0
      136-166 demand L1 E1 ready=127
      166-196 demand L1 E2 ready=127
      171-171 release L1 E1
      201-201 release L1 E2
    """
    spans = play(registered("deepspeed"), step({0: 1, 2: 1}, {1: 1, 2: 1}), costs=uniform_costs(copy_ns=30))
    assert told(lane(spans, "h2d"), expected) == lines(expected)


BESIDE_THE_CPU = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L1 E0
  0-0    place L1 E1
host:
  0-1    launch L0
  37-38  wait L0
  38-39  plan L0
  39-40  launch L0 E0
  40-41  launch L0
  41-42  launch L1
  110-111 wait L1
  111-112 plan L1
  112-113 launch L1 E0
  113-114 launch L1 E1
  114-115 launch L1
  115-116 launch L-1
  129-130 wait L-1
gpu:
  1-31   attention L0
  31-36  gate L0
  40-45  expert L0 E0
  69-74  combine L0 ready=69   # the CPU is over at 47, 2 is there at 69; 1 + 4 for reading the result
  74-104 attention L1
  104-109 gate L1
  113-118 expert L1 E0
  118-123 expert L1 E1
  123-124 combine L1 ready=115
  124-128 attention L-1
cpu:
  40-47  expert L0 E1         # activations here at 40
h2d:
  39-69  demand L0 E2 ready=39
  69-69  release L0 E2
d2h:
  36-37  routing L0
  39-40  activations L0
  109-110 routing L1
  128-129 routing L-1
"""


class StreamsTheIdle:
    """In layer 0: 0 on the GPU, 1 on the CPU, 2 copied for nobody. In layer 1 all stay where they lie."""

    def assign(self, view: LayerView) -> Assignment:
        return Assignment((0,), (1,), (), 0, (2,)) if view.layer == 0 else Assignment((0, 1), (), (), 0)


def test_a_layer_waits_for_a_streamed_expert_longer_than_for_the_cpu() -> None:
    placed = Placed(((0,), (0, 1)))
    policy = Composition(placement=placed, assigner=StreamsTheIdle(), cache=StaticCache(), demand_slots=1)
    costs = uniform_costs(attention_ns=30, gate_ns=5, copy_ns=30, result_ns=4)
    spans = play(policy, step({0: 1, 1: 1}, {0: 1, 1: 1}), cache_bytes=placed.bytes, costs=costs)
    assert told(spans, BESIDE_THE_CPU) == lines(BESIDE_THE_CPU)
    # 0-1 host; 36-40 host (a launch); 45-47 the CPU, 47-69 the copy; 109-113 host (a launch); 128-130 host.
    assert stalls_of(spans_frame([tuple(s) for s in spans])) == Stalls(h2d_ns=22, cpu_ns=2, host_ns=11)  # type: ignore[misc]
