"""Timelines worked out by hand: prefetches late, wasted, withdrawn, a swap behind one. Notation: ``hand_worked``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.mechanism.session import Session
from policies.mechanism.views import Assignment, Forecast, LayerView, PolicyError
from policies.papers.dali.parts import WindowCache
from policies.parts.assigners import LoadAll, ResidentOrCpu
from policies.parts.caches import StaticCache
from policies.parts.prefetchers import TopPrefetcher
from policies.protocols import Composition, Needs
from sim.costs.cost_table import ResultPath
from sim.runs.demand import StepDemand
from sim.runs.spans import spans_frame
from sim.runs.stalls import stalls_of
from tests.kit.hand_worked import Placed, lane, lines, play, registered, step, told
from tests.kit.toys import uniform_costs


def looking_ahead(placed: Placed, **parts: Any) -> Composition:
    """Loads everything, prefetches up to two experts into staging, and keeps what was placed."""
    given: dict[str, Any] = {"cache": StaticCache(), "prefetch_slots": 2, **parts}
    return Composition(
        placement=placed, assigner=LoadAll(), prefetcher=TopPrefetcher(2, "gate", "staging"),
        needs=Needs(forecasts=(("gate", 1),)), **given,
    )


PLACED = Placed(((0, 1), (0,)))
DEMAND = ({0: 1, 1: 1}, {0: 1, 2: 1})  # layer 1 will miss 2
PREFETCH: dict[str, Any] = {"cache_bytes": PLACED.bytes, "costs": uniform_costs(copy_ns=40)}
FIRST_LAYER = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L0 E1
  0-0    place L1 E0
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
d2h:
  13-14  routing L0
  15-16  routing L0 >1
  40-41  routing L1
"""

WASTED = FIRST_LAYER + """
host:
  111-112 wait L-1
gpu:
  100-105 expert L1 E2 ready=100
  105-106 combine L1
  106-110 attention L-1
h2d:
  20-60  prefetch L1 E1 ready=20   # runs when layer 1 is routed at 42, and layer 1 has no use for it
  60-60  release L1 E1        # wasted: leaves as it arrives
  60-100 demand L1 E2 ready=43   # its prefetch was still queued at 42: a demand load, from the plan's end on
  105-105 release L1 E2
d2h:
  110-111 routing L-1
"""


def test_a_running_prefetch_that_nobody_needs_is_wasted_and_a_queued_one_becomes_a_demand_load() -> None:
    demand = step(*DEMAND, forecast=Forecast(1, "gate", (1, 2), (1, 1)))
    assert told(play(looking_ahead(PLACED), demand, **PREFETCH), WASTED) == lines(WASTED)


LATE = FIRST_LAYER + """
host:
  71-72  wait L-1
gpu:
  60-65  expert L1 E2 ready=60   # launched 45, awaited until 60
  65-66  combine L1
  66-70  attention L-1
h2d:
  20-60  prefetch L1 E2 ready=20   # runs when layer 1 is routed: late
  42-42  withdraw L1 E1 >1    # still queued as its plan begins, and layer 1 has no use for it
  65-65  release L1 E2
d2h:
  70-71  routing L-1
"""


def test_a_running_prefetch_is_awaited_and_a_queued_one_that_nobody_needs_is_withdrawn() -> None:
    demand = step(*DEMAND, forecast=Forecast(1, "gate", (2, 1), (1, 1)))
    assert told(play(looking_ahead(PLACED), demand, **PREFETCH), LATE) == lines(LATE)


def test_a_swap_is_ready_at_the_end_of_the_layer_that_asked_for_it_however_long_the_lane_is_busy() -> None:
    # Timeline of FIRST_LAYER: layer 0 ends at 28, layer 1 (both experts resident) at 55, the step at 61.
    expected = """
    h2d, step -1:
      0-0    place L0 E0
      0-0    place L0 E1
      0-0    place L1 E0
      0-0    place L1 E2
    h2d:
      20-100 prefetch L1 E1 ready=20   # wasted
      100-100 release L1 E1
      100-100 evict L0 E0     # 2 for the lower of two equals; layer 1 would swap in 1, which is under way
      100-180 swap L0 E2 ready=28
    """
    placed = Placed(((0, 1), (0, 2)))
    policy = looking_ahead(placed, cache=WindowCache(2, 3, 1, 1))
    demand = step(*DEMAND, forecast=Forecast(1, "gate", (1,), (2,)))
    spans = play(policy, demand, cache_bytes=placed.bytes, costs=uniform_costs(copy_ns=80))
    assert told(lane(spans, "h2d"), expected) == lines(expected)


# --- Whole timelines worked out by hand -------------------------------------------------------------------------------


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


PLACED_LATER = Placed(((), (1, 2)))
JOINED_LATE = """
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
    costs = uniform_costs(cpu_ns=30)
    spans = play(deferral(PLACED_LATER.residents), demand(), cache_bytes=PLACED_LATER.bytes, costs=costs)
    assert told(spans, JOINED_LATE) == lines(JOINED_LATE)
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
