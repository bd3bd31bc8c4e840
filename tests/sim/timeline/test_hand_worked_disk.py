"""Timelines worked out by hand above a disk: a miss that crosses three links (from the disk, to the GPU, and as a
result to it), two GPUs that share the disk, a read ahead.

Notation and costs: ``hand_worked``; a read takes 50, and the host's memory has room for two or three experts. It begins
with the first experts of each layer.
"""

from __future__ import annotations

from policies.mechanism.views import Assignment, Forecast, LayerView
from policies.parts.assigners import LoadAll
from policies.parts.caches import StaticCache
from policies.parts.prefetchers import TopPrefetcher
from policies.protocols import Composition, Needs
from sim.runs.cards import LayerBlock, costs_of_block
from tests.kit.hand_worked import EXPERT_BYTES, LAYERS, Placed, lines, play, play_cards, step, told
from tests.kit.toys import uniform_costs

COSTS = uniform_costs(LAYERS, result_path="h2d").map_experts(lambda expert: expert._replace(read_ns=50))


class FirstToGpu:
    """Copies the first active expert to the GPU and leaves the others to the CPU."""

    def assign(self, view: LayerView) -> Assignment:
        first, *others = view.routing.active
        return Assignment((first,), tuple(others), (first,), 0)


THREE_LINKS = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E1
  17-18  launch L0            # combine
  18-19  launch L1
  138-139 wait L1
  139-140 plan L1
  140-141 launch L1 E0
  141-142 launch L1
  142-143 launch L-1
  254-255 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  86-91  expert L0 E1 ready=86    # read until 66, copied until 86
  124-125 combine L0 ready=124    # the CPU's result is here
  125-135 attention L1
  135-137 gate L1
  210-215 expert L1 E0 ready=210
  248-249 combine L1 ready=248
  249-253 attention L-1
cpu:
  116-123 expert L0 E2 ready=116  # the activations are here at 17, its weights are read until 116
  240-247 expert L1 E1 ready=240
h2d:
  66-86  demand L0 E1 ready=66    # planned at 16, in the host's memory at 66
  91-91  release L0 E1
  123-124 result L0 ready=123
  190-210 demand L1 E0 ready=190
  215-215 release L1 E0
  247-248 result L1 ready=247
d2h:
  13-14  routing L0
  16-17  activations L0
  137-138 routing L1
  140-141 activations L1
  253-254 routing L-1
disk, step -1:
  0-0    keep L0 E0 bytes=100     # room for two: the first expert of each layer
  0-0    keep L1 E0 bytes=100
disk:
  16-16  drop L0 E0 bytes=100     # the oldest leaves as the read starts
  16-66  read L0 E1 ready=16 bytes=100   # planned 16; the GPU's share goes first
  66-66  drop L1 E0 bytes=100     # L0 E1 is in use until its copy ends at 86
  66-116 read L0 E2 ready=16
  140-140 drop L0 E1
  140-190 read L1 E0 ready=140    # held until 66: a memory smaller than what a token uses keeps nothing for the next
  190-190 drop L0 E2
  190-240 read L1 E1 ready=140
"""


def test_a_miss_crosses_the_disk_and_both_links() -> None:
    spans = play(to_gpu_and_cpu(), step({1: 1, 2: 1}, {0: 1, 1: 1}), costs=COSTS, host_bytes=2 * EXPERT_BYTES)
    assert told(spans, THREE_LINKS) == lines(THREE_LINKS)


TWO_GPUS = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E1
  17-18  launch L0            # combine
  18-19  launch L1
  90-91  wait L1
  91-92  plan L1
  92-93  launch L1 E0
  93-94  launch L1
  94-95  launch L-1
  156-157 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  36-41  expert L0 E1 ready=36    # held by the host: no read
  74-75  combine L0 ready=74
gpu1:
  77-87  attention L1 ready=77
  87-89  gate L1
  112-117 expert L1 E0 ready=112
  150-151 combine L1 ready=150
  151-155 attention L-1
cpu:
  66-73  expert L0 E2 ready=66    # the activations are here at 17, its weights are read until 66
  142-149 expert L1 E1 ready=142
h2d:
  16-36  demand L0 E1 ready=16
  41-41  release L0 E1
  73-74  result L0
h2d1:
  76-77  hand_over L1
  92-112 demand L1 E0 ready=92
  117-117 release L1 E0
  149-150 result L1
d2h:
  13-14  routing L0
  16-17  activations L0
  75-76  hand_over L0
d2h1:
  89-90  routing L1
  92-93  activations L1
  155-156 routing L-1
disk, step -1:
  0-0    keep L0 E0               # room for three, of the layers of both GPUs in turn
  0-0    keep L0 E1
  0-0    keep L1 E0
disk:
  16-16  drop L0 E0
  16-66  read L0 E2 ready=16
  92-92  drop L0 E1               # GPU 1's read displaces the layer of GPU 0: it was used at 15, L0 E2 until 73
  92-142 read L1 E1 ready=92

host, step 1:
  157-158 launch L0
  171-172 wait L0
  172-173 plan L0
  173-174 launch L0 E1
  174-175 launch L0
  175-176 launch L1
  264-265 wait L1
  265-266 plan L1
  266-267 launch L1 E0
  267-268 launch L1
  268-269 launch L-1
  347-348 wait L-1
gpu, step 1:
  158-168 attention L0
  168-170 gate L0
  243-248 expert L0 E1 ready=243  # read until 223, copied until 243
  248-249 combine L0
gpu1, step 1:
  251-261 attention L1
  261-263 gate L1
  336-341 expert L1 E0 ready=336
  341-342 combine L1
  342-346 attention L-1
cpu, step 1:
  174-181 expert L0 E2 ready=174  # held
  267-274 expert L1 E1 ready=267  # held
h2d, step 1:
  181-182 result L0
  223-243 demand L0 E1 ready=223
  248-248 release L0 E1
h2d1, step 1:
  250-251 hand_over L1
  274-275 result L1
  316-336 demand L1 E0 ready=316
  341-341 release L1 E0
d2h, step 1:
  170-171 routing L0
  173-174 activations L0
  249-250 hand_over L0
d2h1, step 1:
  263-264 routing L1
  266-267 activations L1
  346-347 routing L-1
disk, step 1:
  173-173 drop L1 E0              # and the other way round: it was used at 91, L1 E1 at 142
  173-223 read L0 E1 ready=173
  266-266 drop L0 E2              # L1 E1 is in use
  266-316 read L1 E0 ready=266
"""


def to_gpu_and_cpu(residents: tuple[tuple[int, ...], ...] = ((), ())) -> Composition:
    return Composition(placement=Placed(residents), assigner=FirstToGpu(), cache=StaticCache(), demand_slots=1)


def test_two_gpus_displace_each_others_experts_from_the_memory_above_one_disk() -> None:
    steps = [step({1: 1, 2: 1}, {0: 1, 1: 1}, index=index) for index in range(2)]
    costs = [costs_of_block(COSTS, LayerBlock(layer, layer + 1)) for layer in range(2)]
    policies = [to_gpu_and_cpu(((),)) for _ in costs]
    spans = play_cards(policies, *steps, slots=(0, 0), costs=costs, host_bytes=3 * EXPERT_BYTES)
    assert told(spans, TWO_GPUS) == lines(TWO_GPUS)


READ_AHEAD = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L0 E1
  0-0    place L1 E0
disk, step -1:
  0-0    keep L1 E1               # room for two, of those that the GPU does not hold
  0-0    keep L0 E2
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
  101-102 wait L-1
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
  90-95  expert L1 E2 ready=90
  95-96  combine L1
  96-100 attention L-1
h2d:
  70-90  demand L1 E2 ready=70    # its prefetch was to be copied from 70 on; from 42 on the layer waits for it
  95-95  release L1 E2
d2h:
  13-14  routing L0
  15-16  routing L0 >1
  40-41  routing L1
  100-101 routing L-1
disk:
  20-20  drop L1 E1               # the older one: not in the forecast, as it happens
  20-70  read_ahead L1 E2 ready=20   # foreseen at 20; 27 of its 50 are over when the plan takes effect
"""


def test_a_prefetch_is_read_ahead_from_its_foresight_on() -> None:
    placed = Placed(((0, 1), (0,)))
    policy = Composition(
        placement=placed, assigner=LoadAll(), cache=StaticCache(), prefetcher=TopPrefetcher(2, "gate", "staging"),
        prefetch_slots=2, needs=Needs(forecasts=(("gate", 1),)),
    )
    demand = step({0: 1, 1: 1}, {0: 1, 2: 1}, forecast=Forecast(1, "gate", (2,), (1,)))
    spans = play(policy, demand, cache_bytes=placed.bytes, costs=COSTS, host_bytes=2 * EXPERT_BYTES)
    assert told(spans, READ_AHEAD) == lines(READ_AHEAD)
