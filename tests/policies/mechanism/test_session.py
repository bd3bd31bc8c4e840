"""The session: order of calls, illegal decisions, demand loads. Prefetches and swaps: ``test_copy_queue``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from policies.mechanism.session import Session
from policies.mechanism.views import (
    Assignment,
    Commitment,
    Copy,
    ExpertId,
    Forecast,
    LayerInput,
    LayerView,
    PolicyError,
    Routing,
    Swap,
    Upload,
)
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache, StaticCache
from policies.parts.routers import TrueRouter
from policies.protocols import Budget, Composition, Needs
from tests.kit.views import (
    COSTS,
    Placed,
    Says,
    Swaps,
    Wants,
    begin,
    e,
    pass_through,
    plan,
    session,
    start,
)


class Sees(LoadAll):
    """Loads everything, and keeps what it was told of when experts are ready, and of copies in flight."""

    def assign(self, view: LayerView) -> Assignment:
        self.ready_ns, self.flying = view.ready_ns, view.flying
        return super().assign(view)


# --- order of calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("calls", "fragment"), [
    ("plan", "plan_layer called while the session is 'idle'; expected between"),
    ("end_layer", "end_layer called while the session is 'idle'; expected planned or foreseen"),
    ("end_step", "end_step called while the session is 'idle'"),
    ("begin begin", "begin_step called while the session is 'between'; expected idle"),
    ("begin foresee", "foresee called while the session is 'between'; expected planned"),
    ("begin plan plan", "plan_layer called while the session is 'planned'"),
    ("begin plan end_step", "end_step called while the session is 'planned'; expected between"),
    ("begin plan foresee foresee", "foresee called while the session is 'foreseen'"),
    ("begin plan foresee plan", "plan_layer called while the session is 'foreseen'"),
    ("begin plan end_layer foresee", "foresee called while the session is 'between'"),
    ("begin plan end_layer plan", "expected layer 1 of step 0"),
    ("begin plan end_layer end_step", "end_step: after layer 0"),
])
def test_a_call_out_of_order_is_an_error(calls: str, fragment: str) -> None:
    it = session()
    known: dict[str, Callable[[], object]] = {
        "begin": lambda: it.begin_step(0),
        "plan": lambda: plan(it, 0, 0, 1),
        "foresee": lambda: it.foresee(()),
        "end_layer": it.end_layer,
        "end_step": it.end_step,
    }
    *before, last = calls.split()
    for call in before:
        known[call]()
    with pytest.raises(PolicyError, match=fragment):
        known[last]()


@pytest.mark.parametrize(("layer", "step"), [(1, 0), (0, 1)])
def test_a_plan_for_another_layer_or_step_is_an_error(layer: int, step: int) -> None:
    it = session()
    it.begin_step(0)
    with pytest.raises(PolicyError, match="expected layer 0 of step 0"):
        plan(it, layer, 0, step=step)


def test_two_copies_may_be_in_flight_and_only_the_older_can_arrive() -> None:
    it = session(demand_slots=3)
    begin(it, 0, 2, 3)
    first, second = start(it), start(it)
    with pytest.raises(PolicyError, match=r"next_copy: expected fewer than 2 copies .*expert=2.*expert=3"):
        it.next_copy()
    with pytest.raises(PolicyError, match=r"copied: expected the oldest copy in flight, got .*expert=3"):
        it.copied(second)
    assert it.copied(first)
    with pytest.raises(PolicyError, match=r"copied: expected the oldest copy in flight, got .*expert=2"):
        it.copied(first)
    assert it.copied(second)
    it.end_layer()


def test_copies_in_flight_for_the_next_layer_are_awaited_in_their_order_and_the_last_takes_all_the_backlog() -> None:
    wants, seen = Wants(), Sees()
    it = session(prefetcher=wants, prefetch_slots=2, assigner=seen)
    begin(it, 0)
    wants.now = (e(1, 3), e(1, 2))
    it.foresee(())
    first, second = start(it), start(it)
    it.end_layer()
    decided = plan(it, 1, 0, 2, 3, left_ns=27)
    assert seen.ready_ns == {0: 0, 3: 7, 2: 27}  # a copy takes 20
    assert seen.flying == (e(1, 3), e(1, 2))
    assert (decided.gpu, decided.awaited, decided.loads) == ((0, 3, 2), (3, 2), ())
    with pytest.raises(PolicyError, match=r"still waits for copies of .*\[2, 3\]"):
        it.end_layer()
    assert it.copied(first)
    assert it.copied(second)
    it.end_layer()


def test_copies_in_flight_that_come_too_late_give_up_their_slots_as_they_arrive() -> None:
    wants = Wants()
    it = session(prefetcher=wants, prefetch_slots=2)
    begin(it, 0)
    wants.now = (e(1, 3), e(1, 2))
    it.foresee(())
    first, second = start(it), start(it)
    it.end_layer()
    assert plan(it, 1, 0, 2).awaited == (2,)
    assert not it.copied(first)
    assert it.copied(second)
    assert (it.staged(1), it.residency.staging["prefetch"]) == ({2}, 1)


def test_only_a_staged_expert_can_give_up_its_staging_slot() -> None:
    it = session()
    begin(it, 0)
    with pytest.raises(PolicyError, match=r"computed: .*expert=0.* is not in a staging slot"):
        it.computed(e(0, 0))


def test_a_layer_cannot_end_while_it_waits() -> None:
    it = session()
    begin(it, 2)
    with pytest.raises(PolicyError, match=r"end_layer: layer 0 still waits for copies of .*\[2\]"):
        it.end_layer()  # queued
    running = start(it)
    with pytest.raises(PolicyError, match="still waits"):
        it.end_layer()  # running
    it.copied(running)
    it.end_layer()


# --- illegal decisions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "fragment"),
    [
        (Says(gpu=[0]), r"assigned gpu \(0,\) and cpu \(\); expected each of \(0, 2\) once"),
        (Says(gpu=[0, 2], cpu=[2], loads=[2]), r"expected each of \(0, 2\) once"),
        (Says(gpu=[0, 0], loads=[]), r"expected each of \(0, 2\) once"),
        (Says(gpu=[0], cpu=[3]), r"expected each of \(0, 2\) once"),
        (Says(gpu=[0, 2]), r"loads \(\); expected the absent experts among its gpu share, \(2,\)"),
        (Says(gpu=[0, 2], loads=[0, 2]), r"loads \(0, 2\); expected the absent experts"),
        (Says(gpu=[0, 2], loads=[2, 2]), r"loads \(2, 2\); expected the absent experts"),
        (Says(gpu=[0], cpu=[2], loads=[2]), r"loads \(2,\); expected the absent experts"),
    ],
    ids=["forgotten", "twice", "twice on one device", "not active", "no load", "resident loaded", "loaded twice",
         "loaded for the CPU"],
)
def test_an_illegal_assignment_is_refused_with_policy_and_place(says: Says, fragment: str) -> None:
    it = session(assigner=says)
    with pytest.raises(PolicyError, match=f"policy 'test', step 0, layer 0: .*{fragment}"):
        begin(it, 0, 2)


@pytest.mark.parametrize("id", [e(0, 2), e(2, 0)])
def test_prefetches_are_for_later_layers_that_there_are(id: ExpertId) -> None:
    wants = Wants()
    it = session(prefetcher=wants)
    begin(it, 0)
    wants.now = [id]
    with pytest.raises(PolicyError, match=r"policy 'test' prefetches .* while layer 0"):
        it.foresee(())


def test_a_prefetch_into_the_cache_may_be_for_the_next_step_and_outlasts_this_one() -> None:
    """Of the layer at work, once it is over; not where it could go to a staging slot."""
    wants = Wants()
    wants.into = "cache"
    it = session(prefetcher=wants, prefetch_slots=0)
    begin(it, 0)
    wants.now = [e(0, 2)]
    foresight, withdrawn = it.foresee(())
    assert (foresight.prefetches, withdrawn) == ((e(0, 2),), ())
    assert it.queued_copies == 1


@pytest.mark.parametrize(
    "swap", [Swap(e(0, 1), e(0, 0)), Swap(e(0, 2), e(0, 3)), Swap(e(1, 2), e(0, 0))],
    ids=["incoming resident", "outgoing absent", "another layer"],
)
def test_a_swap_brings_an_absent_expert_for_a_resident_of_its_layer(swap: Swap) -> None:
    it = session(cache=Swaps({0: [swap]}))
    begin(it, 0)
    with pytest.raises(PolicyError, match="expected an absent expert for a resident one of its layer"):
        it.end_layer()


def test_an_upload_is_of_an_absent_expert() -> None:
    it = session(cache=Swaps({0: [Upload(e(0, 1))]}))
    begin(it, 0)
    with pytest.raises(PolicyError, match=r"policy 'test' uploads .*expert=1.*: expected an absent expert"):
        it.end_layer()


def test_a_gpu_only_policy_needs_a_staging_slot() -> None:
    with pytest.raises(PolicyError, match="staging slot"):
        session(demand_slots=0, needs=Needs(gpu_only=True))


def test_a_load_that_nobody_admits_is_refused_without_a_staging_slot() -> None:
    with pytest.raises(PolicyError, match=r"loads .*expert=2.* without any staging slot"):
        begin(session(demand_slots=0), 0, 2)


# --- demand loads -----------------------------------------------------------------------------------------------------


def test_loads_are_copied_in_order_and_the_gpu_runs_what_is_there_first() -> None:
    it = session(assigner=Says(gpu=[3, 1, 2], loads=[3, 2]), demand_slots=2)
    decided = begin(it, 1, 2, 3)
    assert (decided.gpu, decided.loads, decided.resident) == ((1, 3, 2), (3, 2), (1,))
    assert [pass_through(it), pass_through(it), it.next_copy()] == [e(0, 3), e(0, 2), None]


def test_loads_may_be_copied_in_another_order_than_the_gpu_s() -> None:
    it = session(assigner=Says(gpu=[3, 1, 2], loads=[2, 3]), demand_slots=2)
    assert begin(it, 1, 2, 3).loads == (2, 3)
    assert [pass_through(it), pass_through(it)] == [e(0, 2), e(0, 3)]


def test_victims_are_fixed_when_the_layer_is_planned_and_leave_when_the_copy_starts() -> None:
    it = session(cache=LruCache())
    begin(it, 0, 2)
    assert it.residency.resident[0] == {0, 1}
    copy = start(it)
    assert copy == Copy(e(0, 2), "demand", "cache", (e(0, 1),), 100)
    assert it.residency.resident[0] == {0}
    it.copied(copy)
    assert it.residency.resident[0] == {0, 2}


def test_what_the_event_uses_is_never_a_victim_the_rest_of_its_loads_pass_through_staging() -> None:
    it = session(cache=LruCache())
    begin(it, 0, 2, 3)
    first = start(it)
    assert (first.key, first.into, first.victims) == (e(0, 2), "cache", (e(0, 1),))
    it.copied(first)
    second = start(it)
    assert (second.key, second.into, second.victims) == (e(0, 3), "staging", ())


def test_the_cache_says_in_which_order_the_loads_of_an_event_ask_for_slots() -> None:
    class LastFirst(LruCache):
        def order(self, incoming: Sequence[ExpertId]) -> Sequence[ExpertId]:
            return sorted(incoming, reverse=True)

    it = session(Placed((), (), slots=(1, 1)), cache=LastFirst())
    begin(it, 2, 3)
    first = start(it)
    it.copied(first)
    assert [(first.key, first.into)] == [(e(0, 2), "staging")]  # copied first, but 3 asked first for the slot
    second = start(it)
    assert (second.key, second.into) == (e(0, 3), "cache")


class Stubborn(LruCache):
    """Names one victim whatever is blocked."""

    def __init__(self, victim: ExpertId) -> None:
        super().__init__()
        self.chosen = victim

    def victim(self, incoming: ExpertId, group: int, blocked: object) -> ExpertId | None:
        return self.chosen


@pytest.mark.parametrize("victim", [e(0, 0), e(0, 3), e(1, 0)], ids=["pinned", "absent", "another layer"])
def test_a_victim_that_may_not_leave_is_refused(victim: ExpertId) -> None:
    it = session(cache=Stubborn(victim))
    with pytest.raises(PolicyError, match=r"cache Stubborn chose .* as a victim"):
        begin(it, 0, 2)


def test_a_victim_cannot_be_promised_twice() -> None:
    it = session(cache=Stubborn(e(0, 1)))
    with pytest.raises(PolicyError, match=r"cache Stubborn chose .* as a victim"):
        begin(it, 2, 3)


def test_a_load_that_waits_for_a_staging_slot_blocks_the_lane() -> None:
    wants = Wants()
    it = session(prefetcher=wants)
    begin(it, 2, 3)
    wants.now = [e(1, 2)]
    it.foresee(())
    first = start(it)
    it.copied(first)
    assert it.next_copy() is None  # 3 waits for the slot of 2, and the prefetch behind it
    it.computed(first.key)
    assert pass_through(it) == e(0, 3)
    assert start(it).kind == "prefetch"


class Committing(TrueRouter):
    """Decides the next layer's routing."""

    looks_ahead = True

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        return Commitment(Routing((1,), (1,)))


class Watching(StaticCache):
    """Keeps the scores that it is shown."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def observe(self, view: LayerView) -> None:
        self.seen.append(view.scores)


def test_nobody_sees_the_scores_of_a_router_that_was_not_asked() -> None:
    cache, scores = Watching(), [[0.4, 0.3, 0.2, 0.1]]
    policy = Composition(
        name="committing", placement=Placed((0, 1), (0, 1)), router=Committing(), assigner=LoadAll(), cache=cache
    )
    it = Session(policy, Budget(4, (100, 100), 400), (COSTS, COSTS))
    it.begin_step(0)
    for layer in (0, 1):
        it.plan_layer(LayerInput(0, layer, "decode", Routing((0,), (1,)), scores))
        if layer == 0:
            it.foresee(())
        it.end_layer()
    assert cache.seen == [scores, None]
