"""A timeline worked out by hand in which experts cross three links: from the disk, to the GPU, and as results to it.

Notation and costs: ``hand_worked``; a read takes 50, and the host's memory has room for two experts. It begins with the
first expert of each layer.
"""

from __future__ import annotations

from policies.mechanism.views import Assignment, LayerView
from policies.parts.caches import StaticCache
from policies.protocols import Composition
from tests.kit.hand_worked import EXPERT_BYTES, LAYERS, Placed, lines, play, step, told
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
    policy = Composition(placement=Placed(((), ())), assigner=FirstToGpu(), cache=StaticCache(), demand_slots=1)
    spans = play(policy, step({1: 1, 2: 1}, {0: 1, 1: 1}), costs=COSTS, host_bytes=2 * EXPERT_BYTES)
    assert told(spans, THREE_LINKS) == lines(THREE_LINKS)

