"""What becomes of prefetches and swaps, seen from the session's calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from policies.mechanism.copy_queue import CacheUpdate
from policies.mechanism.session import Session
from policies.mechanism.victims import victims_in_time
from policies.mechanism.views import Assignment, Copy, Eviction, ExpertId, PolicyError, Swap, Updates, Upload
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache, StaticCache
from policies.protocols import Budget, Cache, Composition
from tests.kit.views import (
    COSTS,
    Into,
    Placed,
    Says,
    Swaps,
    Wants,
    begin,
    e,
    plan,
    session,
    start,
)

# --- prefetches -------------------------------------------------------------------------------------------------------


def ahead(*wanted: ExpertId, into: Into = "staging", **parts: Any) -> tuple[Session, Wants]:
    """A session whose layer 0 has foreseen ``wanted``."""
    wants = Wants(into)
    it = session(prefetcher=wants, **parts)
    begin(it, 0)
    wants.now = wanted
    it.foresee(())
    return it, wants


def test_what_is_there_or_named_twice_is_not_prefetched_again() -> None:
    wants = Wants()
    it = session(prefetcher=wants)
    begin(it, 0)
    wants.now = [e(1, 0), e(1, 3), e(1, 2), e(1, 3)]
    foresight, withdrawn = it.foresee(())
    assert (foresight.prefetches, withdrawn) == ((e(1, 3), e(1, 2)), ())


def test_a_prefetch_that_arrived_is_there_for_its_layer_and_keeps_its_slot_until_it_is_computed() -> None:
    it, _ = ahead(e(1, 2), e(1, 3))
    assert it.copied(start(it))
    assert it.next_copy() is None  # one prefetch slot
    it.end_layer()
    decided = plan(it, 1, 0, 2)
    assert (decided.loads, decided.awaited, decided.resident) == ((), (), (0, 2))
    it.computed(e(1, 2))
    assert it.residency.staging["prefetch"] == 1


def test_a_prefetch_that_arrived_unused_gives_up_its_slot_when_the_layer_is_planned() -> None:
    it, _ = ahead(e(1, 2))
    it.copied(start(it))
    it.end_layer()
    assert plan(it, 1, 0, 1).released == (e(1, 2),)
    assert (it.staged(1), it.residency.staging["prefetch"]) == (set(), 1)


def test_a_queued_prefetch_becomes_a_demand_load_or_is_withdrawn() -> None:
    it, _ = ahead(e(1, 2), e(1, 3))
    it.end_layer()
    decided = plan(it, 1, 0, 3)
    assert (decided.loads, decided.withdrawn) == ((3,), (e(1, 2),))
    copy = start(it)
    assert (copy.key, copy.kind) == (e(1, 3), "demand")
    it.copied(copy)
    assert it.next_copy() is None


def test_a_queued_prefetch_whose_expert_runs_on_the_cpu_is_withdrawn() -> None:
    it, _ = ahead(e(1, 2), assigner=Says(cpu=[0]))
    it.end_layer()
    it.policy.assigner.answer = Assignment((), (2,), (), 0)  # type: ignore[attr-defined]
    assert plan(it, 1, 2).withdrawn == (e(1, 2),)
    assert it.next_copy() is None


@pytest.mark.parametrize("left_ns", [7, 0], ids=["under way", "about to arrive"])
def test_a_running_prefetch_is_awaited_if_the_plan_puts_its_expert_on_the_gpu(left_ns: int) -> None:
    it, _ = ahead(e(1, 2))
    copy = start(it)
    it.end_layer()
    decided = plan(it, 1, 0, 2, 3, left_ns=left_ns)
    assert (decided.gpu, decided.loads, decided.awaited) == ((0, 2, 3), (3,), (2,))
    assert decided.resident == (0,)
    with pytest.raises(PolicyError, match=r"still waits for copies of .*\[2, 3\]"):
        it.end_layer()
    assert it.copied(copy)
    assert start(it).key == e(1, 3)


def test_a_running_prefetch_that_the_plan_does_not_use_is_wasted() -> None:
    it, _ = ahead(e(1, 2))
    copy = start(it)
    it.end_layer()
    decided = plan(it, 1, 0, 1)
    assert (decided.awaited, decided.withdrawn, decided.released) == ((), (), ())
    it.end_layer()
    it.end_step()
    assert not it.copied(copy)  # even after the step
    assert (it.staged(1), it.residency.staging["prefetch"]) == (set(), 1)


def test_a_prefetch_that_outlasts_its_step_is_wasted_too() -> None:
    it, _ = ahead(e(1, 2))
    copy = start(it)
    it.end_layer()
    plan(it, 1, 0, 1)
    it.end_layer()
    it.end_step()
    it.begin_step(1)  # a staging slot holds an expert for one layer: not for the same layer a step later
    assert not it.copied(copy)


def test_an_expert_that_came_too_late_once_is_kept_the_next_time() -> None:
    it, wants = ahead(e(1, 2))
    late = start(it)
    it.end_layer()
    plan(it, 1, 0, 1)
    it.end_layer()
    it.end_step()
    begin(it, 0, step=1)
    assert not it.copied(late)
    wants.now = [e(1, 2)]
    it.foresee(())
    assert it.copied(start(it))
    assert it.staged(1) == {2}


def test_a_new_foresight_replaces_what_has_not_started() -> None:
    wants = Wants()
    placed = Placed((0,), (0,), (0,))
    policy = Composition(placement=placed, assigner=LoadAll(), prefetcher=wants, cache=StaticCache(), prefetch_slots=1)
    it = Session(policy, Budget(4, (100,) * 3, 300), (COSTS,) * 3)
    begin(it, 0)
    wants.now = [e(1, 2), e(2, 1), e(2, 2)]
    it.foresee(())
    running = start(it)
    it.end_layer()
    plan(it, 1, 0)
    wants.now = [e(2, 2), e(2, 3)]
    foresight, withdrawn = it.foresee(())
    assert (foresight.prefetches, withdrawn) == ((e(2, 2), e(2, 3)), (e(2, 1),))
    assert not it.copied(running)
    assert start(it).key == e(2, 2)


def test_a_prefetch_into_the_cache_displaces_a_resident_but_no_protected_one() -> None:
    wants = Wants("cache")
    it = session(prefetcher=wants, cache=LruCache())
    begin(it, 0)
    wants.now, wants.protected = [e(1, 2), e(1, 3)], frozenset({e(1, 0)})
    it.foresee(())
    first = start(it)
    assert (first.into, first.victims) == ("cache", (e(1, 1),))
    assert it.copied(first)
    second = start(it)
    assert (second.into, second.victims) == ("cache", (e(1, 2),))  # the least recent that is not protected


def test_queued_copies_are_demand_loads_prefetches_and_swaps() -> None:
    """The link's backlog is their sum."""
    wants = Wants()
    it = played_with_swap(Swap(e(0, 2), e(0, 0)), prefetcher=wants)
    begin(it, 0, 3, step=1)
    wants.now = [e(1, 2), e(1, 3)]
    it.foresee(())
    assert it.queued_copies == 1 + 2 + 1
    assert [start(it).kind, it.queued_copies] == ["demand", 2 + 1]


# --- swaps ------------------------------------------------------------------------------------------------------------


def test_a_swap_takes_the_slot_of_its_victim_after_the_layer() -> None:
    it = session(cache=Swaps({0: [Swap(e(0, 2), e(0, 0))]}))
    begin(it, 0)
    assert it.next_copy() is None
    it.end_layer()
    copy = start(it)
    assert copy == Copy(e(0, 2), "swap", "cache", (e(0, 0),), 100)
    it.copied(copy)
    assert it.residency.resident[0] == {1, 2}


@pytest.mark.parametrize(("swaps_first", "kind"), [(False, "prefetch"), (True, "swap")])
def test_which_of_prefetch_and_swap_goes_first_is_a_parameter(swaps_first: bool, kind: str) -> None:
    cache = Swaps({0: [Swap(e(0, 2), e(0, 0))]})
    it, _ = ahead(e(1, 2), cache=cache, swaps_before_prefetches=swaps_first)
    it.end_layer()
    assert start(it).kind == kind


class LruSwaps(LruCache):
    """An LRU that asks for what the test wants, at the end of the layer of that number."""

    def __init__(self, wanted: Mapping[int, Sequence[CacheUpdate]]) -> None:
        super().__init__()
        self.swaps = Swaps(wanted).swaps  # type: ignore[assignment]


def played_with_swap(*swaps: CacheUpdate, cache: Callable[..., Cache] = Swaps, **parts: Any) -> Session:
    """One step of which ``swaps`` of layer 0 are left, none of them started."""
    it = session(cache=cache({0: swaps}), **parts)
    begin(it, 0)
    it.end_layer()
    plan(it, 1, 0)
    it.end_layer()
    it.end_step()
    return it


def test_a_queued_swap_whose_expert_is_needed_becomes_a_demand_load_into_its_slot() -> None:
    it = played_with_swap(Swap(e(0, 2), e(0, 0)))
    assert begin(it, 1, 2, step=1).loads == (2,)
    copy = start(it)
    assert copy == Copy(e(0, 2), "demand", "cache", (e(0, 0),), 100)
    it.copied(copy)
    assert it.next_copy() is None
    assert it.residency.resident[0] == {1, 2}


def test_a_queued_swap_whose_slot_is_in_use_becomes_a_load_through_staging() -> None:
    it = played_with_swap(Swap(e(0, 2), e(0, 0)))
    begin(it, 0, 2, step=1)
    copy = start(it)
    assert (copy.into, copy.victims) == ("staging", ())


def test_a_swap_waits_while_its_victim_is_pinned() -> None:
    it = played_with_swap(Swap(e(0, 2), e(0, 0)))
    begin(it, 0, step=1)
    assert it.next_copy() is None
    it.end_layer()
    assert start(it).kind == "swap"


def test_a_running_swap_is_awaited_when_its_expert_is_needed() -> None:
    it = played_with_swap(Swap(e(0, 2), e(0, 0)))
    copy = start(it)
    decided = begin(it, 1, 2, step=1)
    assert (decided.awaited, decided.loads, decided.gpu) == ((2,), (), (1, 2))
    assert it.copied(copy)
    it.end_layer()


def test_new_swaps_of_a_layer_replace_its_queued_ones() -> None:
    it = played_with_swap(Swap(e(0, 2), e(0, 0)), Swap(e(0, 3), e(0, 1)))
    cache = it.policy.cache
    assert isinstance(cache, Swaps)
    cache.wanted = {0: [Swap(e(0, 3), e(0, 0))]}
    begin(it, 0, step=1)
    it.end_layer()
    copy = start(it)
    it.copied(copy)
    assert (copy.key, copy.victims, it.next_copy()) == (e(0, 3), (e(0, 0),), None)


def test_an_upload_takes_the_slot_of_the_victim_when_its_copy_starts() -> None:
    it = played_with_swap(Upload(e(0, 2)), cache=LruSwaps)
    assert it.residency.resident[0] == {0, 1}
    assert start(it) == Copy(e(0, 2), "swap", "cache", (e(0, 1),), 100)


def test_an_upload_that_the_cache_gives_no_slot_waits_and_goes_to_one_that_is_left_free() -> None:
    it = session(cache=Swaps({0: [Upload(e(0, 2))], 1: [Eviction(e(0, 1))]}))
    begin(it, 0)
    assert it.end_layer() == Updates((Upload(e(0, 2)),))
    assert it.next_copy() is None, "a static cache has no victims"
    plan(it, 1, 0)
    assert it.end_layer() == Updates(evicted=(e(0, 1),))
    assert it.residency.resident[0] == {0}
    assert start(it) == Copy(e(0, 2), "swap", "cache", (), 100)


def test_a_queued_upload_whose_expert_is_needed_becomes_a_demand_load_into_the_cache() -> None:
    it = played_with_swap(Upload(e(0, 2)), cache=LruSwaps)
    assert begin(it, 2, step=1).loads == (2,)
    assert start(it) == Copy(e(0, 2), "demand", "cache", (e(0, 1),), 100)
    assert it.next_copy() is None


def test_an_expert_is_evicted_and_uploaded_by_the_same_updates() -> None:
    it = session(cache=Swaps({0: [Eviction(e(0, 1)), Upload(e(0, 1))]}))
    begin(it, 0)
    assert it.end_layer() == Updates((Upload(e(0, 1)),), evicted=(e(0, 1),))
    assert it.residency.resident[0] == {0}
    assert start(it) == Copy(e(0, 1), "swap", "cache", (), 100)


def test_an_expert_that_stays_since_a_forecast_names_it_cannot_be_uploaded() -> None:
    again, wants = [Eviction(e(0, 1)), Upload(e(0, 1))], Wants()
    wants.protected = frozenset({e(0, 1)})
    it = session(prefetcher=wants, cache=Swaps({0: again}))
    begin(it, 0)
    it.foresee(())
    with pytest.raises(PolicyError, match="expected an absent expert"):
        it.end_layer()


def test_an_eviction_of_what_has_left_does_nothing() -> None:
    it = session(cache=Swaps({0: [Eviction(e(0, 3))]}))
    begin(it, 0)
    assert it.end_layer() == Updates()


def test_no_expert_is_copied_twice_when_a_swap_overtakes_its_prefetch() -> None:
    cache = Swaps({1: [Swap(e(1, 2), e(1, 0))]})
    wants = Wants()
    it = session(prefetcher=wants, cache=cache, swaps_before_prefetches=True)
    begin(it, 0)
    it.end_layer()
    plan(it, 1, 0)
    it.end_layer()
    it.end_step()
    begin(it, 0, step=1)
    wants.now = [e(1, 2)]  # asked for both as a swap and as a prefetch
    it.foresee(())
    copy = start(it)
    assert copy.kind == "swap"
    it.copied(copy)
    assert it.residency.resident[1] == {1, 2}
    assert it.next_copy() is None


def test_in_a_pool_a_victim_leaves_before_the_first_copy_that_takes_its_room() -> None:
    """Layer 0's experts take 160 bytes, layer 1's 100. Expert 5 asked first and evicts 160 for its 100; 4, which got
    the 60 that are left and the 40 that were free, is copied first."""
    first, second, victim = ExpertId(1, 4), ExpertId(1, 5), ExpertId(0, 0)
    slots: dict[ExpertId, tuple[ExpertId, ...] | None] = {second: (victim,), first: ()}
    size_of = lambda key: (160, 100)[key.layer]  # noqa: E731
    assert victims_in_time(slots, [first, second], 40, size_of) == {first: (victim,), second: ()}
    assert victims_in_time(slots, [second, first], 40, size_of) == slots
    declined: dict[ExpertId, tuple[ExpertId, ...] | None] = {second: (victim,), first: None}
    assert victims_in_time(declined, [first, second], 40, size_of) == declined
