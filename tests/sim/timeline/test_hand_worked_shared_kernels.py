"""A whole timeline worked out by hand: experts that share kernels and a launch. Notation: ``hand_worked``.

The first of them takes 4 ns more on the GPU, and its launch 3 ns more. Experts 0 and 1 are resident in both layers.
"""

from __future__ import annotations

from policies.parts.assigners import LoadAll
from policies.parts.caches import StaticCache
from policies.protocols import Composition
from tests.kit.hand_worked import Placed, lines, play, step, told
from tests.kit.toys import uniform_costs

SHARED_KERNELS = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L0 E1
  0-0    place L1 E0
  0-0    place L1 E1
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-20  launch L0 E0         # for both, 3 + 1
  20-21  launch L0 E1
  21-22  launch L0
  22-23  launch L1
  48-49  wait L1
  49-50  plan L1
  50-54  launch L1 E1         # it is alone, and so is the next
  54-58  launch L1 E2
  58-59  launch L1
  59-60  launch L-1
  85-86  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  20-29  expert L0 E0         # 4 + 5
  29-34  expert L0 E1
  34-35  combine L0
  35-45  attention L1
  45-47  gate L1
  54-63  expert L1 E1         # 4 + 5
  70-79  expert L1 E2         # 4 + 5 again: the kernels of the other have run
  79-80  combine L1
  80-84  attention L-1
h2d:
  50-70  demand L1 E2
  79-79  release L1 E2
d2h:
  13-14  routing L0
  47-48  routing L1
  84-85  routing L-1
"""


def test_the_experts_that_are_there_share_kernels_and_one_that_is_copied_has_its_own() -> None:
    placed = Placed(((0, 1), (0, 1)))
    policy = Composition(placement=placed, assigner=LoadAll(), cache=StaticCache())
    costs = uniform_costs(first_gpu_ns=4, first_expert_launch_ns=3)
    spans = play(policy, step({0: 1, 1: 1}, {1: 1, 2: 1}), cache_bytes=placed.bytes, costs=costs)
    assert told(spans, SHARED_KERNELS) == lines(SHARED_KERNELS)
