"""A timeline worked out by hand: one program computes a layer's experts on the GPU, and then those on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.parts.assigners import ThresholdAssigner
from policies.parts.caches import StaticCache
from policies.protocols import Composition
from tests.kit.hand_worked import Placed, lines, play, step, told
from tests.kit.toys import uniform_costs

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
