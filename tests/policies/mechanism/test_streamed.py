"""Experts that a layer brings although nobody uses them, seen from the session's calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from policies.mechanism.session import Session
from policies.mechanism.views import (
    Assignment,
    Commitment,
    ExpertCosts,
    Forecast,
    Foresight,
    LayerInput,
    LayerView,
    Plan,
    PolicyError,
    Routing,
    Swap,
    Updates,
)
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache, StaticCache
from policies.parts.placements import NoPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import UNDECLARED, Budget, Composition, Needs
from tests.kit.views import COSTS, Placed, Swaps, Wants, begin, e, pass_through, plan, session, start


class Streams:
    """All active experts on the GPU, ``streamed`` besides."""

    def __init__(self, *streamed: int) -> None:
        self.streamed = streamed

    def assign(self, view: LayerView) -> Assignment:
        active, ready = view.routing.active, view.ready_ns
        loads = tuple(expert for expert in active if ready[expert] > 100)
        return Assignment(active, (), loads, 0, tuple(expert for expert in self.streamed if expert not in active))


def streaming(*streamed: int, **parts: Any) -> Session:
    """0 and 1 of four experts are resident; one staging slot of each kind."""
    return session(assigner=Streams(*streamed), **parts)


def test_streamed_experts_come_before_the_loads_and_leave_as_they_arrive() -> None:
    it = streaming(2)
    decided = begin(it, 1, 3)
    assert (decided.gpu, decided.loads, decided.streamed) == ((1, 3), (3,), (2,))
    copy = start(it)
    assert (copy.key, copy.kind, copy.into, copy.victims, copy.expert_bytes) == (e(0, 2), "demand", "staging", (), 100)
    assert not it.copied(copy)  # nobody needs it: the one staging slot is free for the load
    assert not it.residency.holds(e(0, 2))
    assert pass_through(it) == e(0, 3)
    it.end_layer()


def test_the_layer_does_not_end_before_they_have_come() -> None:
    it = streaming(3, 2)
    assert begin(it, 0, 1).streamed == (3, 2)
    assert not it.copied(start(it))
    with pytest.raises(PolicyError, match=r"layer 0 still waits for copies of \[2\]"):
        it.end_layer()
    assert not it.copied(start(it))
    it.end_layer()


def test_they_take_no_cache_slot_even_if_there_is_one() -> None:
    it = streaming(2, placed=Placed((0,), (0,), slots=(2, 2)), cache=LruCache())
    begin(it, 0)
    assert start(it).into == "staging"


def test_what_is_there_or_on_its_way_is_not_streamed() -> None:
    wants = Wants()
    it = streaming(0, 1, 2, 3, prefetcher=wants, prefetch_slots=2)
    begin(it, 0, 1)
    for expert in (2, 3):
        assert not it.copied(start(it)), expert
    wants.now = [e(1, 2), e(1, 3)]
    it.foresee(())
    it.copied(start(it))
    running = start(it)
    it.end_layer()
    decided = plan(it, 1, 0, 1, left_ns=5)
    assert (running.key, decided.streamed, decided.released) == (e(1, 3), (), (e(1, 2),))
    assert not it.copied(running)  # wasted, like any prefetch that nobody needs
    it.end_layer()


def test_a_queued_prefetch_is_streamed_instead_of_withdrawn() -> None:
    wants = Wants()
    it = streaming(prefetcher=wants)
    begin(it, 0)
    wants.now = [e(1, 3), e(1, 2)]
    it.foresee(())
    it.end_layer()
    it.policy.assigner.streamed = (2,)  # type: ignore[attr-defined]
    decided = plan(it, 1, 0)
    assert (decided.streamed, decided.withdrawn) == ((2,), (e(1, 3),))
    assert start(it).kind == "demand"


def test_a_queued_swap_of_a_streamed_expert_is_dropped() -> None:
    it = streaming(cache=Swaps({0: [Swap(e(1, 2), e(1, 1))]}))
    begin(it, 0)
    assert len(it.end_layer().queued) == 1
    it.policy.assigner.streamed = (2,)  # type: ignore[attr-defined]
    assert plan(it, 1, 0).streamed == (2,)
    assert it.next_copy(demand=False) is None  # while the plan is not in effect
    assert not it.copied(start(it))
    assert it.next_copy() is None
    assert it.residency.resident[1] == {0, 1}


class ComputesAhead(TrueRouter):
    """Layer 1 will run 2 and 3, and the CPU begins on 2."""

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        return Commitment(Routing((2, 3), (1, 1)), (2,))


def test_what_the_cpu_computes_ahead_is_not_streamed() -> None:
    policy = replace(streaming(prefetcher=Wants()).policy, router=ComputesAhead())
    it = Session(policy, Budget(4, (100, 100), 400), (COSTS, COSTS))
    begin(it, 0)
    it.foresee(())
    it.end_layer()
    it.policy.assigner.streamed = (2, 1)  # type: ignore[attr-defined]
    decided = plan(it, 1, 2, 3)
    assert (decided.precomputed, decided.loads, decided.streamed) == ((2,), (3,), ())


@pytest.mark.parametrize("streamed", [(0,), (2, 2), (4,), (-1,)])
def test_streamed_are_experts_of_the_layer_without_workload_each_once(streamed: tuple[int, ...]) -> None:
    class Wrong:
        def assign(self, view: LayerView) -> Assignment:
            return Assignment((0,), (), (), 0, streamed)

    with pytest.raises(PolicyError, match="expected experts of 4 without workload, each once"):
        begin(session(assigner=Wrong()), 0)


def test_streaming_needs_a_staging_slot() -> None:
    with pytest.raises(PolicyError, match="give it demand_slots >= 1"):
        begin(streaming(2, demand_slots=0), 0)


# --- what is left out of costs, inputs and decisions is nothing -------------------------------------------------------


ROUTING = Routing((), ())


def test_costs_without_write_back_and_contention() -> None:
    costs = ExpertCosts((0, 1), (0, 1), 0, 1, 1)
    assert (costs.writeback_ns, costs.cpu_permille, costs.copy_permille, costs.between_ns) == (0, 1000, 1000, 0)


def test_a_layer_on_idle_lanes() -> None:
    given = LayerInput(0, 0, "decode", ROUTING)
    assert (given.scores, given.sequences, given.h2d_backlog_ns, given.cpu_backlog_ns) == (None, (), 0, 0)


def test_decisions_about_no_expert() -> None:
    assert Assignment((), (), (), 0).streamed == Plan(0, ROUTING, *((),) * 9, 0).streamed == ()
    assert Assignment((), (), (), 0).deferred == Plan(0, ROUTING, *((),) * 9, 0).deferred == ()
    assert (Commitment(ROUTING).precompute, Foresight(), Updates()) == ((), ((), None, frozenset()), ((), (), ()))


def test_a_policy_that_declares_nothing_needs_nothing() -> None:
    nothing = {"forecasts": (), "forecast_layers": {}, "forecast_phases": ("prefill", "decode"), "max_batch": None}
    nothing["narrow_share"] = None
    flags = (
        "scores", "tokens", "future", "calibration", "calibrated_tokens", "uniform_sizes", "gpu_only",
        "changes_routing",
    )
    assert asdict(Needs()) == nothing | dict.fromkeys(flags, False)


def test_a_composition_of_three_parts() -> None:
    """One kind of staging slots, no prefetches, no routing but the model's own; the registry gives it its name."""
    bare = Composition(placement=NoPlacement(), assigner=LoadAll(), cache=StaticCache())
    assert type(bare.router) is TrueRouter
    assert (bare.prefetcher, bare.swaps_before_prefetches, bare.writes_back) == (None, False, "never")
    assert (bare.demand_slots, bare.prefetch_slots, bare.decision_cost, bare.name) == (2, 0, "", "")
    assert (bare.needs is UNDECLARED, bare.parameters) == (True, {})
