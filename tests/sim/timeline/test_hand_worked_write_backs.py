"""Timelines worked out by hand: experts that are written back in the stream of the copies. Notation and costs:
``hand_worked``; a copy takes 20, a write-back 30."""

from __future__ import annotations

from dataclasses import replace

from policies.protocols import Composition
from sim.runs.demand import StepDemand
from sim.runs.spans import Span
from tests.kit.hand_worked import EXPERT_BYTES, LAYERS, lines, play, registered, step, told
from tests.kit.toys import uniform_costs

COSTS = uniform_costs(writeback_ns=30)
IN_TURN = """
h2d:
  16-16  evict L0 E2
  16-36  demand L0 E0         # 1 is in use
  69-69  evict L1 E1
  69-89  demand L1 E0
d2h:
  13-14  routing L0
  36-66  writeback L0 E2 ready=36 bytes=100   # the copy has ended, and the expert that it brought runs
  66-67  routing L1 ready=54  # computed 54
  89-119 writeback L1 E1
  119-120 routing L-1 ready=99
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E1
  36-41  expert L0 E0
  41-42  combine L0
  42-52  attention L1
  52-54  gate L1
  70-75  expert L1 E2
  89-94  expert L1 E0
  94-95  combine L1
  95-99  attention L-1
"""


def played(policy: Composition, demand: StepDemand, slots: int) -> list[Span]:
    """Spans of the link, the way back and the GPU, with so many slots a layer."""
    spans = play(policy, demand, cache_bytes=slots * LAYERS * EXPERT_BYTES, costs=COSTS)
    return [span for span in spans if span.lane in ("h2d", "d2h", "gpu") and span.step >= 0]


def test_mixtral_offloading_as_implemented_writes_its_victim_back_after_each_copy() -> None:
    spans = played(registered("mixtral-offloading@impl"), step({0: 1, 1: 1}, {0: 1, 2: 1}), slots=2)
    assert told(spans, IN_TURN) == lines(IN_TURN)


LARGER_THAN_THE_CACHE = """
h2d:
  16-16  evict L0 E2          # the one resident, which the layer does not use
  16-36  demand L0 E0
  66-86  demand L0 E1         # into a buffer, since 0 is in use
  91-91  release L0 E1
  119-139 demand L1 E1        # the same next to 2, which is there
  144-144 release L1 E1
d2h:
  13-14  routing L0
  36-66  writeback L0 E2
  86-116 writeback L0 E1      # in the code an expert of the same event, as large
  116-117 routing L1 ready=104   # experts to 91, combine to 92, attention and gate to 104
  139-169 writeback L1 E1
  169-170 routing L-1 ready=149
gpu:
  1-11   attention L0
  11-13  gate L0
  36-41  expert L0 E0
  86-91  expert L0 E1
  91-92  combine L0
  92-102 attention L1
  102-104 gate L1
  120-125 expert L1 E2
  139-144 expert L1 E1
  144-145 combine L1
  145-149 attention L-1
"""
DEMAND = step({0: 1, 1: 1}, {1: 1, 2: 1})


def test_each_load_of_an_event_that_is_larger_than_the_cache_writes_an_expert_back() -> None:
    spans = played(registered("mixtral-offloading@impl"), DEMAND, slots=1)
    assert told(spans, LARGER_THAN_THE_CACHE) == lines(LARGER_THAN_THE_CACHE)


def test_without_writing_back_the_second_copy_follows_the_first() -> None:
    spans = played(replace(registered("mixtral-offloading@impl"), writes_back="never"), DEMAND, slots=1)
    # layer 0: computed 61, combined 62; layer 1: gate 74, routing here 75, waited 76, planned 77
    assert [(s.start_ns, s.end_ns) for s in spans if s.kind == "demand"] == [(16, 36), (36, 56), (77, 97)]
