"""Whole timelines worked out by hand: a pool of threads, copies that the GPU makes itself, a window that needs both.

Notation and costs: ``hand_worked``. The model has 6 experts here, of which a window of four tokens chooses all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from policies.mechanism.session import Session
from policies.mechanism.views import Assignment, ExpertId, LayerView, Swap
from policies.parts.caches import StaticCache
from policies.parts.miss_share import MissShare
from policies.protocols import Budget, Composition, Needs, When
from sim.costs.cost_table import CostTable, DraftWork
from sim.runs.demand import StepDemand
from sim.runs.spans import Span
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.timeline import Timeline
from tests.kit.hand_worked import Placed, lines, step, told
from tests.kit.toys import uniform_costs

EXPERTS = 6


def played(
    policy: Composition, demand: StepDemand, placed: Placed, costs: CostTable, *more: StepDemand
) -> list[Span]:
    budget = Budget(EXPERTS, (100,) * len(costs.experts), placed.bytes)
    engine = Timeline(Session(policy, budget, costs.experts), costs, [demand, *more], TokenBytes(4, 48))
    engine.run()
    return [Span(*row) for row in engine.recorder.rows if row[4] != "place"]


def policy_of(placed: Placed, share: float, slots: int = 4) -> Composition:
    return Composition(
        placement=placed, assigner=MissShare(share, most=4), cache=StaticCache(), demand_slots=slots
    )


WINDOW = """
host:
  0-8    program L-1          # of the window, before anything is launched
  8-9    launch L0
  22-23  wait L0
  23-24  plan L0
  24-25  launch L0 E0         # the hits' call: the first of them bears the launch,
  25-25  launch L0 E1
  25-26  launch L0 E4         # and so does the first of the copied ones
  26-26  launch L0 E5
  26-27  launch L0            # combine
  27-28  launch L-1
  99-100 wait L-1 tokens=1    # one of three drafts is accepted
gpu:
  9-19   attention L0 tokens=4
  19-21  gate L0
  25-33  expert L0 E0 tokens=2   # 5, and 3 that the call's experts share
  33-38  expert L0 E1
  38-58  fetch L0 E4 bytes=100   # only now, and the GPU does nothing else
  58-78  fetch L0 E5
  78-86  expert L0 E4 ready=78   # one call, once the last of them is there
  86-91  expert L0 E5 ready=78
  92-94  combine L0 ready=92  # 1, and the pool's result, which is read in place: it has ended last
  94-98  attention L-1
d2h:
  21-22  routing L0
  24-25  activations L0 bytes=16
  98-99  routing L-1
cpu:
  25-53  gate_up L0 E2 tokens=2 bytes=0    # park 2 (4 of the first expert's time, less the barrier's 2), 2 tokens of 13
  53-66  gate_up L0 E3 tokens=1
  66-84  expert L0 E2 tokens=2 bytes=100   # barrier 2, 2 x 8
  84-92  expert L0 E3
h2d:
  38-58  demand L0 E4 ready=38
  58-78  demand L0 E5 ready=38
  86-86  release L0 E4
  91-91  release L0 E5
"""


def test_a_window_with_a_pool_and_copies_by_the_gpu() -> None:
    """Four rows, one layer. Experts 0 and 1 are there. Of the missed 2, 3, 4 and 5, with 2, 1, 1 and 1 tokens, half
    are copied: the last ones by tokens, then by number."""
    costs = uniform_costs(1, cpu_ns=21, first_cpu_ns=4, first_gpu_ns=3, expert_launch_ns=0, first_expert_launch_ns=1)
    costs = replace(costs, kernel_copies=True, permille_before_barrier=620, barrier_ns=2, step_ns=8)
    demand = step({0: 2, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1})
    demand = demand._replace(context=(9,), drafted=3, generated=2)
    placed = Placed(((0, 1),))
    spans = played(policy_of(placed, 0.5), demand, placed, costs)
    assert told(spans, WINDOW) == lines(WINDOW)


ONE_SLOT = """
gpu:
  1-11   attention L0
  11-13  gate L0
  16-36  fetch L0 E0
  36-44  expert L0 E0 ready=36   # a call of its own, as the next copy needs its slot
  44-64  fetch L0 E1
  64-72  expert L0 E1 ready=64
  72-73  combine L0
  73-77  attention L-1
h2d:
  16-36  demand L0 E0 ready=16
  44-44  release L0 E0
  44-64  demand L0 E1 ready=44
  72-72  release L0 E1
"""


def test_without_a_slot_for_the_next_copy_the_gpu_runs_what_it_has_copied() -> None:
    costs = replace(uniform_costs(1, first_gpu_ns=3), kernel_copies=True)
    placed = Placed(((),))
    spans = played(policy_of(placed, 1.0, slots=1), step({0: 1, 1: 1}), placed, costs)
    assert [s.lane for s in spans if s.kind == "gate_up"] == []
    shown = [span for span in spans if span.lane in ("gpu", "h2d")]
    assert told(shown, ONE_SLOT) == lines(ONE_SLOT)


DEFERRED = """
cpu:
  17-24  gate_up L0 E0        # 7 of 14; park 0: there is no time of the first one
  24-31  expert L0 E0
  31-38  gate_up L0 E1        # a batch of its own, whose result the next layer adds
  38-45  deferred L0 E1
"""


def test_deferred_experts_are_a_batch_of_their_own() -> None:
    """Both on the CPU; the second of layer 0 is deferred. Layer 1 has its experts on the GPU."""
    costs = replace(uniform_costs(2, cpu_ns=14), permille_before_barrier=500)
    placed = Placed(((), (0, 1)))
    policy = replace(policy_of(placed, 0.0), assigner=DefersLast(), needs=Needs(changes_routing=True))
    spans = played(policy, step({0: 1, 1: 1}, {0: 1, 1: 1}), placed, costs)
    assert told([span for span in spans if span.lane == "cpu"], DEFERRED) == lines(DEFERRED)


class SwapsOnce(StaticCache):
    """At the end of the first step, expert 2 for expert 1."""

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        return [Swap(ExpertId(0, 2), ExpertId(0, 1))] if when == "step_end" and view.step == 0 else []


@pytest.mark.parametrize(("waits", "begins_ns"), [(True, 55), (False, 37)])
def test_a_window_waits_for_swaps_that_its_drafts_do_not_hide(waits: bool, begins_ns: int) -> None:
    """The first step: head until 32, copy of its token, 1, and wait, 1. The swap takes the link from 34 to 54. The next
    window drafts a token, 3 on the GPU, until 37. Its attention is launched in 1."""
    costs = replace(uniform_costs(1), draft=DraftWork(0, 0, 3))
    placed = Placed(((0, 1),))
    window = step({0: 2, 1: 2}, index=1)._replace(drafted=1, generated=1)
    policy = replace(policy_of(placed, 0.0), cache=SwapsOnce(), awaits_swaps=waits)
    spans = played(policy, step({0: 1, 1: 1}), placed, costs, window)
    (swap,) = (span for span in spans if span.kind == "swap")
    assert (swap.start_ns, swap.end_ns) == (34, 54)
    assert next(s for s in spans if s.kind == "attention" and s.step == 1).start_ns == begins_ns


class DefersLast(MissShare):
    def __init__(self) -> None:
        super().__init__(0.0, most=1)

    def assign(self, view: LayerView) -> Assignment:
        chosen = super().assign(view)
        return chosen._replace(deferred=chosen.cpu[-1:])
