"""Residency: capacity, promises, victims, staging quotas."""

from __future__ import annotations

from collections.abc import Container, Sequence

import pytest

from policies.mechanism.residency import Residency
from policies.mechanism.views import Copy, ExpertId, PolicyError
from policies.parts.caches import DemandCache, LruCache, StaticCache
from policies.parts.placements import NoPlacement
from policies.protocols import Budget, Cache, InitialPlacement


def e(layer: int, expert: int) -> ExpertId:
    return ExpertId(layer, expert)


def residency(
    *residents: Sequence[int], slots: Sequence[int] | None = (2, 2), cache: Cache | None = None,
    sizes: tuple[int, ...] = (100, 100), cache_bytes: int = 400, demand: int = 1, prefetch: int = 1,
) -> Residency:
    """Two layers of four experts."""
    placed = tuple(tuple(layer) for layer in residents) or ((),) * len(sizes)
    placement = InitialPlacement(None if slots is None else tuple(slots), placed)
    return Residency(Budget(4, sizes, cache_bytes), placement, cache or LruCache(), demand, prefetch)


def bring(it: Residency, id: ExpertId, victims: tuple[ExpertId, ...]) -> None:
    """A copy into the cache, from start to end."""
    copy = Copy(id, "demand", "cache", victims, 100)
    it.start(copy)
    it.finish(copy)


# --- the start --------------------------------------------------------------------------------------------------------


def test_who_was_placed_is_there_and_the_cache_knows() -> None:
    seen: list[tuple[ExpertId, int]] = []

    class Listens(StaticCache):
        def admitted(self, id: ExpertId, group: int) -> None:
            seen.append((id, group))

    it = residency((0, 1), (3,), cache=Listens())
    assert it.resident == [{0, 1}, {3}]
    assert seen == [(e(0, 0), 0), (e(0, 1), 0), (e(1, 3), 1)]
    assert (it.holds(e(1, 3)), it.holds(e(1, 0))) == (True, False)


@pytest.mark.parametrize(("residents", "slots", "fragment"), [
    (((), ()), (3, 2), "placement asks for 500 bytes of slots, the budget has 400"),
    (((0, 1, 2), ()), (2, 2), "no slot of its own for expert 2 of layer 0"),
    (((1, 1), ()), (2, 2), "no slot of its own for expert 1 of layer 0"),
    (((0, 1, 2), (0, 1)), None, "no slot of its own for expert 1 of layer 1"),
], ids=["too many slots", "too many residents", "one twice", "pool too small"])
def test_a_placement_that_does_not_fit_is_refused(
    residents: tuple[tuple[int, ...], ...], slots: tuple[int, ...] | None, fragment: str
) -> None:
    with pytest.raises(PolicyError, match=fragment):
        residency(*residents, slots=slots)


def test_no_slot_at_all_is_legal() -> None:
    budget = Budget(4, (100, 100), 0)
    it = Residency(budget, NoPlacement().place(budget), LruCache(), 0, 0)
    assert it.promise(e(0, 0), set()) is None


def test_narrow_copies_are_experts_of_their_own_size() -> None:
    """Experts of 100 bytes; numbers 4 to 7 are their narrow copies, of 30. In a layer's 200 bytes: one and three."""
    budget = Budget(4, (100, 100), 400)
    it = Residency(budget, InitialPlacement((2, 2), ((0,), ())), LruCache(), narrow_bytes=(30, 30))
    assert [it.size_of(e(0, expert)) for expert in (3, 4, 7)] == [100, 30, 30]
    assert not it.uniform
    for expert in (4, 5, 6):
        assert it.promise(e(0, expert), set()) == ()
        bring(it, e(0, expert), ())
    assert it.free(0) == 10
    assert it.promise(e(0, 7), {e(0, 0)}) == (e(0, 4),)
    assert it.promise(e(0, 1), {e(0, 7)}) == (e(0, 0),)  # the least recent, whose 100 bytes are enough with 10 more


# --- promises ---------------------------------------------------------------------------------------------------------


def test_a_free_slot_has_no_victim() -> None:
    it = residency((0,), ())
    assert it.promise(e(0, 2), set()) == ()


def test_a_promised_slot_is_taken_before_the_copy_starts() -> None:
    it = residency((0,), ())
    it.promise(e(0, 2), {e(0, 0)})
    assert it.promise(e(0, 3), {e(0, 0), e(0, 2)}) is None


def test_a_victim_stays_until_the_copy_starts_and_is_not_promised_again() -> None:
    it = residency((0, 1), ())
    assert it.promise(e(0, 2), set()) == (e(0, 0),)
    assert it.resident[0] == {0, 1}
    assert it.promise(e(0, 3), {e(0, 0), e(0, 2)}) == (e(0, 1),)
    bring(it, e(0, 2), (e(0, 0),))
    assert it.resident[0] == {1, 2}


def test_layers_do_not_compete_where_slots_are_by_layer() -> None:
    it = residency((0, 1), (0,))
    assert it.promise(e(0, 2), {e(0, 0), e(0, 1)}) is None
    assert it.promise(e(1, 1), set()) == ()


def test_all_layers_compete_for_a_pool() -> None:
    it = residency((0, 1), (0, 1), slots=None)
    assert it.promise(e(1, 2), {e(0, 0)}) == (e(0, 1),)


def test_a_cache_that_admits_nothing_gets_nothing() -> None:
    assert residency((0,), (), cache=StaticCache()).promise(e(0, 1), set()) is None


def test_a_large_expert_displaces_as_many_small_ones_as_it_needs() -> None:
    it = residency((0, 1, 2), (), slots=None, sizes=(100, 200), cache_bytes=350)
    assert it.promise(e(1, 0), {e(0, 1)}) == (e(0, 0), e(0, 2))
    # 350 - 100 - 200 = 50 are left
    assert it.promise(e(0, 3), {e(0, 0), e(0, 1), e(0, 2), e(1, 0)}) is None


def test_where_too_few_may_leave_nobody_does() -> None:
    it = residency((0, 1, 2), (), slots=None, sizes=(100, 200), cache_bytes=300)
    assert it.promise(e(1, 0), {e(0, 1), e(0, 2)}) is None  # 0 alone makes no room for 200
    assert it.resident[0] == {0, 1, 2}
    assert it.promise(e(0, 3), {e(0, 1), e(0, 2)}) == (e(0, 0),)  # and may still be chosen


def test_a_swap_takes_the_place_of_the_outgoing() -> None:
    it = residency((0, 1), ())
    assert it.promise_slot_of(e(0, 2), e(0, 1)) == (e(0, 1),)
    bring(it, e(0, 2), (e(0, 1),))
    assert it.resident[0] == {0, 2}
    assert it.promise(e(0, 3), {e(0, 0), e(0, 2)}) is None  # no slot has appeared


@pytest.mark.parametrize(("chosen", "blocked"), [
    (e(0, 0), {e(0, 0)}), (e(0, 3), set()), (e(1, 0), set()),
], ids=["pinned", "not there", "another layer's"])
def test_a_victim_that_may_not_leave_is_refused(chosen: ExpertId, blocked: set[ExpertId]) -> None:
    class Insists(DemandCache):
        def admitted(self, id: ExpertId, group: int) -> None: ...

        def evicted(self, id: ExpertId, group: int) -> None: ...

        def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
            return chosen

    it = residency((0, 1), (0,), cache=Insists())
    with pytest.raises(PolicyError, match=r"cache Insists chose .*: it is pinned, promised or not in group 0"):
        it.promise(e(0, 2), blocked)


# --- staging ----------------------------------------------------------------------------------------------------------


def test_a_staging_slot_is_taken_when_the_copy_starts_and_free_when_released() -> None:
    it = residency()
    copy = Copy(e(0, 2), "demand", "staging", (), 100)
    it.start(copy)
    assert (it.staging["demand"], it.holds(copy.key)) == (0, False)
    it.finish(copy)
    assert (it.staged[0], it.resident[0], it.holds(copy.key)) == ({2}, set(), True)
    it.release(copy.key)
    assert (it.staging["demand"], it.holds(copy.key)) == (1, False)


def test_loads_and_prefetches_have_their_own_quotas() -> None:
    it = residency(demand=1, prefetch=2)
    load, prefetch = Copy(e(0, 2), "demand", "staging", (), 100), Copy(e(1, 2), "prefetch", "staging", (), 100)
    for copy in (load, prefetch):
        it.start(copy)
        it.finish(copy)
    assert it.staging == {"demand": 0, "prefetch": 1}
    it.release(prefetch.key)
    assert it.staging == {"demand": 0, "prefetch": 2}
    it.release(load.key)
    assert it.staging == {"demand": 1, "prefetch": 2}


def test_a_copy_into_the_cache_takes_no_staging_slot() -> None:
    it = residency((0,), ())
    it.promise(e(0, 2), set())
    bring(it, e(0, 2), ())
    assert it.staging == {"demand": 1, "prefetch": 1}
