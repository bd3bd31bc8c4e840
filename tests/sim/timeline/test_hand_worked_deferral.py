"""Whole timelines worked out by hand: an expert that joins the next layer. Notation and costs: ``hand_worked``.

One token goes to 0 and 1 in layer 0, where the CPU computes both and 1, of the lower weight, is deferred; and to 1 and
2 in the last layer, which defers none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.mechanism.session import Session
from policies.mechanism.views import Assignment, LayerView, PolicyError
from policies.parts.assigners import ResidentOrCpu
from policies.protocols import Composition, Needs
from sim.costs.cost_table import ResultPath
from sim.runs.demand import StepDemand
from sim.runs.spans import spans_frame
from sim.runs.stalls import stalls_of
from tests.kit.hand_worked import Placed, lane, lines, play, registered, step, told
from tests.kit.toys import uniform_costs


def deferral(residents: tuple[tuple[int, ...], ...]) -> Composition:
    return replace(registered("kt-deferral", strategy="uniform"), placement=Placed(residents))


def demand() -> StepDemand:
    asked = step({0: 1, 1: 1}, {1: 1, 2: 1})
    ids = ((0, 1), (2, 1))
    routings = tuple(
        routing._replace(token_ids=[chosen], token_weights=[(0.75, 0.25)])
        for routing, chosen in zip(asked.routings, ids, strict=True)
    )
    return asked._replace(routings=routings)


HIDDEN = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0            # combine
  17-18  launch L1
  41-42  wait L1
  42-43  plan L1
  43-44  launch L1
  44-45  launch L-1
  67-68  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  26-28  combine L0 ready=26  # 0 is over at 26: layer 0 does not wait for 1; 1 + 1 for the result
  28-38  attention L1         # while the CPU computes 1
  38-40  gate L1
  60-62  combine L1 ready=60  # of its own experts, and of 1 of layer 0, which was over at 33
  62-66  attention L-1
cpu:
  17-26  expert L0 E0         # 7 + 2 for the first of the layer
  26-33  deferred L0 E1 ready=17 tokens=1 bytes=100   # behind the other one: 7
  44-53  expert L1 E1
  53-60  expert L1 E2
d2h:
  13-14  routing L0
  16-17  activations L0
  40-41  routing L1
  43-44  activations L1
  66-67  routing L-1
"""


def test_a_deferred_expert_runs_under_the_next_layers_attention() -> None:
    spans = play(deferral(((), ())), demand(), costs=uniform_costs(first_cpu_ns=2))
    assert told(spans, HIDDEN) == lines(HIDDEN)


PLACED = Placed(((), (1, 2)))
LATE = """
h2d, step -1:
  0-0    place L1 E1
  0-0    place L1 E2
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0
  17-18  launch L1
  62-63  wait L1
  63-64  plan L1
  64-65  launch L1 E1
  65-66  launch L1 E2
  66-67  launch L1
  67-68  launch L-1
  84-85  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  47-49  combine L0 ready=47
  49-59  attention L1
  59-61  gate L1
  65-70  expert L1 E1
  70-75  expert L1 E2
  77-79  combine L1 ready=77  # 1 of layer 0 is over at 77, its own experts at 75; 1 + 1 for the result
  79-83  attention L-1
cpu:
  17-47  expert L0 E0         # 30 each
  47-77  deferred L0 E1
d2h:
  13-14  routing L0
  16-17  activations L0
  61-62  routing L1
  83-84  routing L-1
"""


def test_the_next_layer_waits_for_a_deferred_expert_though_its_own_are_on_the_gpu() -> None:
    spans = play(deferral(PLACED.residents), demand(), cache_bytes=PLACED.bytes, costs=uniform_costs(cpu_ns=30))
    assert told(spans, LATE) == lines(LATE)
    stalls = stalls_of(spans_frame([tuple(span) for span in spans]))  # type: ignore[misc]
    assert stalls.cpu_ns == (47 - 13) + (77 - 75)  # for 0, and for 1 a layer later


OVER_THE_LINK = """
h2d:
  26-27  result L0 ready=26   # of 0 alone
  60-61  result L1 ready=60   # of the layer's own experts and of 1 of layer 0
"""


def test_over_the_link_each_layer_has_one_result() -> None:
    path: ResultPath = "h2d"
    spans = play(deferral(((), ())), demand(), costs=uniform_costs(first_cpu_ns=2, result_path=path))
    assert told(lane(spans, "h2d"), OVER_THE_LINK) == lines(OVER_THE_LINK)


class AllLater:
    """Defers whatever the CPU computes, or ``chosen`` in its place."""

    def __init__(self, *chosen: int) -> None:
        self.chosen = chosen

    def assign(self, view: LayerView) -> Assignment:
        made = ResidentOrCpu().assign(view)
        return made._replace(deferred=self.chosen or made.cpu)


@pytest.mark.parametrize(("chosen", "changes", "message"), [
    ((), {}, r"layer 1: defers \(1, 2\); expected none in the last layer"),
    ((0,), {}, r"layer 0: defers \(0,\); expected the last ones of its cpu share, \(0, 1\)"),
    ((2,), {}, r"layer 0: defers \(2,\); expected the last ones of its cpu share"),
    ((1,), {"needs": Needs()}, r"policy 'kt-deferral' defers experts, .*declare Needs\(changes_routing=True\)"),
])
def test_what_may_be_deferred(chosen: tuple[int, ...], changes: dict[str, Any], message: str) -> None:
    policy = replace(deferral(((), ())), assigner=AllLater(*chosen), **changes)
    with pytest.raises(PolicyError, match=message):
        play(policy, demand())


def test_a_layer_may_leave_all_that_the_cpu_computes_to_the_next() -> None:
    """So there is nothing to wait for, and no result to read."""
    policy = replace(deferral(((), ())), assigner=FirstLayerLater())
    combine, later = (span for span in lane(play(policy, demand()), "gpu") if span.kind == "combine")
    assert (combine.ready_ns, combine.start_ns, combine.end_ns) == (17, 17, 18)  # its launch
    assert later.layer == 1


class FirstLayerLater(AllLater):
    """All of layer 0."""

    def assign(self, view: LayerView) -> Assignment:
        return super().assign(view) if view.layer == 0 else ResidentOrCpu().assign(view)


def test_the_session_puts_into_force_what_the_assigner_defers(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, plan_layer = [], Session.plan_layer

    def planned(self: Session, given: Any) -> Any:
        plans.append(plan_layer(self, given))
        return plans[-1]

    monkeypatch.setattr(Session, "plan_layer", planned)
    play(deferral(((), ())), demand())
    assert [(plan.cpu, plan.immediate, plan.deferred) for plan in plans] == [((0, 1), (0,), (1,)), ((1, 2), (1, 2), ())]
