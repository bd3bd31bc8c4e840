"""Timelines worked out by hand on a machine whose GPU shares cores and memory with the rest. Notation: ``hand_worked``.

Experts that are resident run on the GPU (10 ns), others on the CPU (5 ns a token) unless a copy (21 ns) is sooner. In
layer 0 that is two experts on the GPU, and one of 3 tokens on the CPU; in layer 1 one of the two has to be copied. The
activations are on their way for 2 ns.
"""

from __future__ import annotations

from typing import Any

import pytest

from policies.parts.assigners import CostRule
from policies.parts.caches import StaticCache
from policies.protocols import Composition
from sim.runs.spans import Span
from tests.kit.hand_worked import Placed, lines, play, step, told
from tests.kit.toys import uniform_costs


def run(**rates: int) -> list[Span]:
    """The run with some rates below 1000 permille."""
    placed = Placed(((0, 1), (0,)))
    policy = Composition(placement=placed, assigner=CostRule(), cache=StaticCache())
    times: dict[str, Any] = {"gpu_ns": 10, "cpu_ns": 5, "copy_ns": 21, "activations_ns": 2}
    demand = step({0: 6, 1: 5, 2: 3}, {0: 4, 1: 7, 2: 3})
    spans = play(policy, demand, cache_bytes=placed.bytes, costs=uniform_costs(**times, **rates))
    return [span for span in spans if span.kind != "place"]


EACH_AT_HALF_ITS_RATE = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  launch L1
  61-62  wait L1
  62-63  plan L1
  63-64  launch L1 E0
  64-65  launch L1 E1
  65-66  launch L1
  66-67  launch L-1
  103-104 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  17-34  expert L0 E0         # by the plan the CPU computes 16-31: in 14 ns next to it 7 are done, the last 3 alone
  34-44  expert L0 E1
  46-48  combine L0 ready=46  # 1 + 1; the CPU's work is over
  48-58  attention L1
  58-60  gate L1
  64-81  expert L1 E0         # the CPU until 78 by the plan: in 14 ns next to it 7 are done, the last 3 alone
  84-96  expert L1 E1         # the CPU until 88, as it is slowed: in 4 ns next to it 2 are done, the last 8 alone
  96-98  combine L1 ready=88
  98-102 attention L-1
cpu:
  18-46  expert L0 E2         # the GPU has work until 44: in 26 ns next to it 13 are done, the last 2 alone
  65-88  expert L1 E2         # until 81, since E1 is not there yet: in 16 ns next to it 8 are done, the last 7 alone
h2d:
  63-84  demand L1 E1
  96-96  release L1 E1
d2h:
  13-14  routing L0
  16-18  activations L0
  60-61  routing L1
  63-65  activations L1
  102-103 routing L-1
"""


def test_gpu_and_cpu_experts_slow_each_other_down_by_what_the_other_has_been_given() -> None:
    spans = run(gpu_with_cpu_permille=500, cpu_with_gpu_permille=500)
    assert told(spans, EACH_AT_HALF_ITS_RATE) == lines(EACH_AT_HALF_ITS_RATE)


GPU_NEXT_TO_CPU = """
gpu:
  1-11   attention L0
  11-13  gate L0
  17-34  expert L0 E0   # the CPU until 31
  34-44  expert L0 E1
  44-46  combine L0
  46-56  attention L1
  56-58  gate L1
  62-79  expert L1 E0   # the CPU until 76
  82-92  expert L1 E1   # copied 61-82
  92-94  combine L1
  94-98  attention L-1
cpu:
  18-33  expert L0 E2
  63-78  expert L1 E2
"""

CPU_NEXT_TO_GPU = """
gpu:
  1-11   attention L0
  11-13  gate L0
  17-27  expert L0 E0
  27-37  expert L0 E1
  42-44  combine L0
  44-54  attention L1
  54-56  gate L1
  60-70  expert L1 E0
  80-90  expert L1 E1   # copied 59-80
  90-92  combine L1
  92-96  attention L-1
cpu:
  18-42  expert L0 E2   # the GPU until 37: in 19 ns 9.5 are done, and what that adds is rounded down
  61-80  expert L1 E2   # the GPU until 70: in 9 ns 4.5 are done
"""

GPU_NEXT_TO_COPIES = """
gpu:
  1-11   attention L0
  11-13  gate L0
  17-27  expert L0 E0
  27-37  expert L0 E1
  37-39  combine L0
  39-49  attention L1
  49-51  gate L1
  55-75  expert L1 E0   # E1 will be copied 54-75
  75-85  expert L1 E1
  85-87  combine L1
  87-91  attention L-1
cpu:
  18-33  expert L0 E2
  56-71  expert L1 E2
"""


@pytest.mark.parametrize(("rate", "expected"), [
    ("gpu_with_cpu_permille", GPU_NEXT_TO_CPU),
    ("cpu_with_gpu_permille", CPU_NEXT_TO_GPU),
    ("gpu_permille", GPU_NEXT_TO_COPIES),
])
def test_each_rate_slows_one_lane_next_to_another(rate: str, expected: str) -> None:
    spans = [span for span in run(**{rate: 500}) if span.lane in ("gpu", "cpu")]
    assert told(spans, expected) == lines(expected)
