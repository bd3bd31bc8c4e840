"""Timelines worked out by hand on a machine whose GPU shares cores and memory with the rest. Notation: ``hand_worked``.

Experts that are resident run on the GPU (10 ns), others on the CPU (5 ns a token) unless a copy (21 ns) is sooner. In
layer 0 that is two experts on the GPU, and one of 3 tokens on the CPU; in layer 1 one of the two has to be copied. The
activations are on their way for 2 ns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.parts.assigners import CostRule, LoadAll, ThresholdAssigner
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


# --- A whole timeline worked out by hand ------------------------------------------------------------------------------


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


# --- A timeline worked out by hand ------------------------------------------------------------------------------------


TOGETHER = """
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E0         # resident
  36-41  expert L0 E1         # copied from 16 to 36
  41-43  combine L0           # and reads the CPU's result
  43-53  attention L1
  53-55  gate L1
  59-64  expert L1 E0
  66-68  combine L1
  68-72  attention L-1
cpu:
  17-24  expert L0 E2
  59-66  expert L1 E1
"""
IN_SERIES = """
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E0
  36-41  expert L0 E1
  49-51  combine L0
  51-61  attention L1
  61-63  gate L1
  67-72  expert L1 E0
  80-82  combine L1
  82-86  attention L-1
cpu:
  42-49  expert L0 E2 ready=42  # the GPU's last expert ends at 41, and the activations come over
  73-80  expert L1 E1 ready=73  # no copy: after the resident's 72
"""


@pytest.mark.parametrize(("serial", "expected"), [(False, TOGETHER), (True, IN_SERIES)], ids=["together", "in series"])
def test_the_cpus_experts_wait_for_the_gpus_where_one_program_runs_both(serial: bool, expected: str) -> None:
    placed = Placed(((0,), (0,)))
    policy = Composition(placement=placed, assigner=ThresholdAssigner(1), cache=StaticCache(), demand_slots=1)
    demand = step({0: 1, 1: 2, 2: 1}, {0: 3, 1: 1})
    spans = play(policy, demand, cache_bytes=placed.bytes, costs=replace(uniform_costs(), serial=serial))
    shown = [span for span in spans if span.lane in ("gpu", "cpu") and span.kind != "place"]
    assert told(shown, expected) == lines(expected)
