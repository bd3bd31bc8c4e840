"""Residency: capacity, promises, victims, staging quotas."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.residency import Residency
from policies.mechanism.score_rows import ScoreRows
from policies.mechanism.shared_dram import rates_together
from policies.mechanism.views import Copy, ExpertCosts, ExpertId, PolicyError
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


# --- A cache update that finds its expert in a free staging slot exchanges the slots instead of copying ---------------


A, B, C, D = (ExpertId(0, e) for e in range(4))


def of_two_layers(demand_slots: int = 1) -> Residency:
    """One layer of four experts; D is cached."""
    return Residency(Budget(4, (10,), 10), InitialPlacement((1,), ((3,),)), StaticCache(), demand_slots, 0)


def stage(it: Residency, id: ExpertId) -> None:
    """Copy an expert into a staging slot, use it, and give the slot back."""
    copy = Copy(id, "demand", "staging", (), 10)
    it.start(copy)
    it.finish(copy)
    it.release(id)


def test_an_expert_that_lies_in_a_free_slot_is_adopted() -> None:
    it = of_two_layers()
    stage(it, A)
    assert not it.holds(A)  # its slot may be taken at any moment
    assert it.adopt(A, D)
    assert it.holds(A)
    assert not it.holds(D)
    assert it.staging == {"demand": 1, "prefetch": 0}


def test_the_next_copy_takes_the_slot_and_what_lay_in_it_is_gone() -> None:
    it = of_two_layers()
    stage(it, A)
    stage(it, B)
    assert not it.adopt(A, D)
    assert it.adopt(B, D)


def test_an_empty_slot_is_taken_before_one_that_holds_something() -> None:
    it = of_two_layers(demand_slots=2)
    stage(it, A)
    stage(it, B)
    stage(it, C)  # two slots: A, the oldest, is overwritten
    assert not it.adopt(A, D)
    assert it.adopt(B, D)


def test_nobody_is_adopted_twice_or_while_being_copied_again() -> None:
    it = of_two_layers(demand_slots=2)
    stage(it, A)
    it.start(Copy(A, "demand", "staging", (), 10))
    assert not it.adopt(A, D)
    stage(it, B)
    assert it.adopt(B, D)
    assert not it.adopt(B, B)


def test_a_slot_that_is_smaller_than_a_staging_slot_is_not_given_for_one() -> None:
    """Staging slots hold the largest expert; layer 0 has smaller ones."""
    it = Residency(Budget(4, (10, 20), 10), InitialPlacement((1, 0), ((3,), ())), StaticCache(), 1, 0)
    stage(it, A)
    assert not it.adopt(A, D)
    assert it.holds(D)


# --- Scores of a layer ------------------------------------------------------------------------------------------------


STORED = np.array([[0.1, 0.7, 0.2], [0.3, 0.3, 0.4]], np.float16)
ROWS, LISTS = ScoreRows(STORED), STORED.tolist()


def test_it_is_read_like_the_lists() -> None:
    assert [list(ROWS), ROWS[1], ROWS[:1], len(ROWS)] == [LISTS, LISTS[1], LISTS[:1], 2]
    assert type(ROWS[0][0]) is float


def test_it_is_the_array_of_the_lists() -> None:
    for made in (np.asarray(ROWS), np.asarray(ROWS, np.float64)):
        assert made.dtype == np.float64
        np.testing.assert_array_equal(made, np.asarray(LISTS))
    made[0] = 0
    assert ROWS == LISTS


def test_every_half_is_the_number_that_numpy_reads() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    np.testing.assert_array_equal(np.asarray(ScoreRows(halves)), halves.astype(np.float64))
    np.testing.assert_array_equal(np.asarray(ScoreRows(halves[:, ::3])), halves[:, ::3].astype(np.float64))
    assert np.asarray(ScoreRows(halves[:1]), np.float32).dtype == np.float32


@pytest.mark.parametrize("other", [[], [[0.0] * 3] * 2, 5, None])
def test_it_equals_nothing_else(other: object) -> None:
    assert other != ROWS


# --- CPU experts and copies share what the DRAM gives by what each asks of it -----------------------------------------


RATE = st.integers(100, 1000)
TIME = st.integers(1, 10**7)


def machine(read_ns: int, copy_ns: int, cpu_permille: int, copy_permille: int) -> ExpertCosts:
    return ExpertCosts((0, 1), (0, read_ns), 0, copy_ns, 1, cpu_permille=cpu_permille, copy_permille=copy_permille)


MACHINES = st.builds(machine, TIME, TIME, RATE, RATE)


def test_the_rates_of_a_machine_are_those_of_an_expert_that_only_reads() -> None:
    assert rates_together(machine(100, 100, 600, 800), 100, 100) == (600, 800)


def test_an_expert_that_computes_twice_as_long_as_it_reads_is_slowed_only_below_half_of_its_bandwidth() -> None:
    assert rates_together(machine(100, 100, 600, 800), 200, 100) == (1000, 900)  # draws 0.5, and leaves 0.1
    assert rates_together(machine(100, 100, 400, 800), 200, 100) == (800, 800)  # gets 0.4 of the 0.5 that it would draw
    assert rates_together(machine(100, 300, 600, 800), 200, 100) == (1000, 1000)  # the link needs a third of the 0.3


@given(MACHINES, TIME)
def test_work_takes_as_long_as_its_reading_at_the_contended_rate_or_as_its_arithmetic(
    costs: ExpertCosts, more: int
) -> None:
    read_ns = costs.cpu_ns[1]
    cpu, _ = rates_together(costs, read_ns + more, read_ns)
    exact = max(read_ns * 1000 / costs.cpu_permille, read_ns + more)
    assert exact <= (read_ns + more) * 1000 / cpu <= exact * (1 + 1 / cpu) + 1


@given(MACHINES, TIME, TIME)
def test_both_never_draw_more_than_they_do_where_both_are_bound_by_the_dram(
    costs: ExpertCosts, more: int, scale: int
) -> None:
    """In units of the bandwidth of an expert of one token; a rate is never above 1 nor below the contended one."""
    read_ns = costs.cpu_ns[1]
    cpu, copy = rates_together(costs, read_ns + more, read_ns)
    assert costs.cpu_permille <= cpu <= 1000
    assert costs.copy_permille <= copy <= 1000
    copies_draw = read_ns / costs.copy_ns / 1000
    drawn = cpu / 1000 * read_ns / (read_ns + more) + copy * copies_draw
    assert drawn <= costs.cpu_permille / 1000 + costs.copy_permille * copies_draw + 0.002


@given(MACHINES, TIME, st.integers(2, 9))
def test_the_unit_of_time_does_not_matter(costs: ExpertCosts, more: int, c: int) -> None:
    scaled = costs._replace(cpu_ns=(0, costs.cpu_ns[1] * c), copy_ns=costs.copy_ns * c)
    read_ns = costs.cpu_ns[1]
    assert rates_together(costs, read_ns + more, read_ns) == rates_together(scaled, (read_ns + more) * c, read_ns * c)
