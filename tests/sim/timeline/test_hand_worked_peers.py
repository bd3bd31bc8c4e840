"""Timelines of GPUs that compute a layer together, worked out by hand. Notation: ``hand_worked``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from policies.mechanism.session import Session
from policies.mechanism.views import LayerInput, Plan
from policies.protocols import Budget
from policies.registry import BuildContext, compose
from sim.costs.cost_table import CostTable
from sim.machine.peers import PeerLink
from sim.runs.demand import StepDemand
from sim.runs.expert_shares import ExpertShare, counts_of, dealt
from sim.runs.spans import Span
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.peers import PeersTimeline
from tests.kit.hand_worked import EXPERT_BYTES, lane, lines, step, told
from tests.kit.toys import uniform_costs

QUICK = uniform_costs(1)
STEPS = step({0: 1, 1: 1}), step({0: 1, 1: 1}, index=1)


class ToldSession(Session):
    """A session that keeps the rest of the CPU's work that each plan is told."""

    told: list[int]

    def plan_layer(self, given: LayerInput) -> Plan:
        self.told = [*getattr(self, "told", ()), given.cpu_backlog_ns]
        return super().plan_layer(given)


def sessions_of(
    policies: Sequence[str], costs: Sequence[CostTable], slots: Sequence[int], shares: Sequence[ExpertShare]
) -> list[ToldSession]:
    """A session for each GPU's experts of one layer."""
    return [
        ToldSession(
            compose(policy, {}, context=BuildContext("toy", share.experts, 1)),
            Budget(share.experts, (EXPERT_BYTES,), count * EXPERT_BYTES), own.experts,
        )
        for policy, share, count, own in zip(policies, shares, slots, costs, strict=True)
    ]


def played(
    policies: Sequence[str], costs: Sequence[CostTable], slots: Sequence[int], experts: int = 3,
    demand: Sequence[StepDemand] = STEPS,
) -> list[Span]:
    """Steps of one layer, of whose experts GPU 0 has 0, 2, ..., GPU 1 has 1, 3, ..."""
    shares = dealt(counts_of(experts, [1] * len(costs)), np.arange(experts)[None])
    sessions = sessions_of(policies, costs, slots, shares)
    return [Span(*row) for row in PeersTimeline(sessions, shares, costs, demand, TokenBytes(4, 48)).spans()]


TWO_GPUS = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0             # combine
  18-19  launch L0 E1          # the peer's
  19-20  launch L0             # its sum
  20-21  launch L-1
  51-52  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  36-41  expert L0 E0 ready=36
  45-46  combine L0 ready=45   # the peer's sum is here at 45
  46-50  attention L-1
gpu1:
  37-42  expert L0 E1 ready=37     # copied by 36, its input is here at 37
  42-43  partial_sum L0
h2d:
  16-36  demand L0 E0 ready=16
  44-45  hand_over L0 ready=44 bytes=4
h2d1:
  16-36  demand L0 E1 ready=16
  36-37  hand_over L0 ready=17 bytes=4   # behind the copy that began before it
d2h:
  13-14  routing L0
  16-17  activations L0 bytes=4    # to the host, for the peer
  50-51  routing L-1
d2h1:
  43-44  hand_over L0 ready=43 bytes=4

host, step 1:
  52-53  launch L0
  66-67  wait L0
  67-68  plan L0
  68-69  launch L0 E0
  69-70  launch L0
  70-71  launch L0 E1
  71-72  launch L0
  72-73  launch L-1
  85-86  wait L-1
gpu, step 1:
  53-63  attention L0
  63-65  gate L0
  69-74  expert L0 E0
  79-80  combine L0
  80-84  attention L-1
gpu1, step 1:
  71-76  expert L0 E1 ready=71     # its input is here at 70, its launch at 71
  76-77  partial_sum L0
h2d, step 1:
  78-79  hand_over L0
h2d1, step 1:
  69-70  hand_over L0 ready=69
d2h, step 1:
  65-66  routing L0
  68-69  activations L0
  84-85  routing L-1
d2h1, step 1:
  77-78  hand_over L0
"""


def test_a_peer_computes_its_experts_while_the_first_gpu_does() -> None:
    """On-demand loading, a slot for each expert. Both copy at once, each over its own link."""
    assert told(played(["on-demand"] * 2, [QUICK] * 2, [2, 1]), TWO_GPUS) == lines(TWO_GPUS)


WITH_THE_CPU = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0             # combine
  17-18  launch L0 E1
  18-19  launch L0
  19-20  launch L-1
  51-52  wait L-1
cpu:
  17-24  expert L0 E0
gpu:
  1-11   attention L0
  11-13  gate L0
  45-46  combine L0 ready=45   # the CPU's part is there at 25, the peer's sum at 45
  46-50  attention L-1
gpu1:
  37-42  expert L0 E1
  42-43  partial_sum L0
h2d:
  24-25  result L0
  44-45  hand_over L0
h2d1:
  16-36  demand L0 E1
  36-37  hand_over L0
d2h:
  13-14  routing L0
  16-17  activations L0        # once, for the CPU and the peer
  50-51  routing L-1
d2h1:
  43-44  hand_over L0

host, step 1:
  52-53  launch L0
  66-67  wait L0
  67-68  plan L0
  68-69  launch L0
  69-70  launch L0 E1
  70-71  launch L0
  71-72  launch L-1
  84-85  wait L-1
cpu, step 1:
  69-76  expert L0 E0
gpu, step 1:
  53-63  attention L0
  63-65  gate L0
  78-79  combine L0            # the CPU's part at 77, the peer's sum at 78
  79-83  attention L-1
gpu1, step 1:
  70-75  expert L0 E1
  75-76  partial_sum L0
h2d, step 1:
  76-77  result L0 ready=76
  77-78  hand_over L0 ready=77
h2d1, step 1:
  69-70  hand_over L0
d2h, step 1:
  65-66  routing L0
  68-69  activations L0
  83-84  routing L-1
d2h1, step 1:
  76-77  hand_over L0 ready=76
"""


def test_the_cpu_computes_next_to_both_on_the_same_activations() -> None:
    """The first GPU has no slot and leaves its expert to the CPU, whose result crosses the link that the sum does."""
    queued = replace(QUICK, result_path="h2d")
    assert told(played(["naive-cpu", "on-demand"], [queued] * 2, [0, 1]), WITH_THE_CPU) == lines(WITH_THE_CPU)


@pytest.mark.parametrize(("own_lane", "there", "back"), [(True, "peer1", "peer1"), (False, "h2d1", "h2d")])
def test_a_link_between_them_is_crossed_once_each_way(own_lane: bool, there: str, back: str) -> None:
    """4 bytes take 2 and 3 more. Over PCIe hidden states go ahead of the copy, which they make 5 later."""
    linked = replace(QUICK, peer=PeerLink(2, 4 / 3e-9, own_lane))
    spans = played(["on-demand"] * 2, [QUICK, linked], [2, 1])
    crossed = [span[:5] for span in spans if span.kind == "hand_over" and span.step == 0]
    [expert] = [span for span in lane(spans, "gpu1") if (span.kind, span.step) == ("expert", 0)]
    assert expert.start_ns == (36 if own_lane else 41)
    left_ns = expert.end_ns + 1
    assert sorted(crossed, key=lambda span: span[1]) == [
        (there, 16, 16, 21, "hand_over"), (back, left_ns, left_ns, left_ns + 5, "hand_over"),
    ]
    assert not any(span.kind == "activations" for span in spans)


def test_a_peers_experts_that_are_there_together_take_the_time_of_a_first_one_once() -> None:
    """5 each, and 3 more for the first of a group, whose launch takes 1 and 2 more; in step 0 each is a group."""
    grouped = uniform_costs(1, first_gpu_ns=3, first_expert_launch_ns=2)
    steps = [step(dict.fromkeys(range(4), 1), index=index) for index in range(2)]
    spans = played(["on-demand"] * 2, [grouped] * 2, [2, 2], 4, steps)
    for name, kind, times in (("gpu1", "expert", (8, 8, 8, 5)), ("host", "launch", (3, 3, 3, 1))):
        taken = [(span.step, span.expert, span.end_ns - span.start_ns) for span in lane(spans, name)
                 if span.kind == kind and span.expert in (1, 3)]
        assert taken == list(zip((0, 0, 1, 1), (1, 3, 1, 3), times, strict=True))


def test_each_plan_is_told_what_those_before_it_have_given_the_cpu() -> None:
    """7 ns a token: the first plan has given it one of expert 0, the second one of expert 1."""
    costs, shares = [QUICK] * 3, dealt([1, 1, 1], np.arange(3)[None])
    sessions = sessions_of(["naive-cpu"] * 3, costs, [0, 0, 0], shares)
    PeersTimeline(sessions, shares, costs, [step({0: 1, 1: 1, 2: 2})], TokenBytes(4, 48)).spans()
    assert [session.told for session in sessions] == [[0], [7], [14]]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_with_links_and_launches_of_no_time_a_layer_takes_the_experts_of_one_gpu(gpus: int) -> None:
    """Every GPU holds its experts, and each step uses four: D GPUs take 4 / D of an expert's 5 ns, and a sum of 1."""
    free = dict.fromkeys(("attention_launch_ns", "expert_launch_ns", "combine_launch_ns", "head_launch_ns"), 0)
    free |= dict.fromkeys(("routing_ns", "activations_ns", "result_ns", "sync_ns", "plan_ns"), 0)
    costs = uniform_costs(1, **free)
    demand = [step(dict.fromkeys(range(4), 1), index=index) for index in range(3)]
    shares = dealt([4 // gpus] * gpus, np.arange(4)[None])
    sessions = sessions_of(["on-demand"] * gpus, [costs] * gpus, [4 // gpus] * gpus, shares)
    rows = PeersTimeline(sessions, shares, [costs] * gpus, demand, TokenBytes(4, 48)).spans()
    first, last = (max(row[3] for row in rows if row[6] == number) for number in (1, 2))
    assert last - first == 10 + 2 + 4 // gpus * 5 + (gpus > 1) + 1 + 4
