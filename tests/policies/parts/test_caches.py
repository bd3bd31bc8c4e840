"""Every cache obeys the laws; FIFO, LRU, LFU and random do what their names say."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import cache as memoise
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.mechanism.cache_replay import ReplayEvent, replay
from policies.mechanism.views import ExpertId, LayerView, PolicyError
from policies.papers.dali.parts import WindowCache
from policies.parts.belady import BeladyBypassCache, BeladyCache
from policies.parts.caches import FifoCache, LfuCache, LruCache, RandomCache, StaticCache
from policies.parts.future import NEVER, Future
from policies.protocols import Budget, Cache, InitialPlacement
from policies.testing.cache_laws import EXPERTS, LAYERS, CacheLaws, CacheScenario
from tests.kit.depth import examples
from tests.kit.views import costs, view


class TestStaticLaws(CacheLaws):
    declines = True

    def fresh(self, scenario: CacheScenario) -> Cache:
        return StaticCache()


class TestRandomLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return RandomCache(seed=3)


class TestFifoLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return FifoCache()


class TestLruLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return LruCache()


class TestLfuLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return LfuCache()


class TestLfuWithoutHistoryLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return LfuCache(history=False)


class TestBeladyLaws(CacheLaws):
    foresight = True

    def fresh(self, scenario: CacheScenario) -> Cache:
        return BeladyCache(scenario.future)


class TestBeladyBypassLaws(CacheLaws):
    foresight = declines = True

    def fresh(self, scenario: CacheScenario) -> Cache:
        return BeladyBypassCache(scenario.future)


class TestWindowLaws(CacheLaws):
    declines = True

    def fresh(self, scenario: CacheScenario) -> Cache:
        return WindowCache(LAYERS, EXPERTS, window=2, update=2, stagger=True)


class TestAdmittingWindowLaws(CacheLaws):
    declines = True

    def fresh(self, scenario: CacheScenario) -> Cache:
        return WindowCache(LAYERS, EXPERTS, window=2, update=1, admits=True)


class ForgetsBlocked(LruCache):
    """Broken: evicts experts that the event uses."""

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return super().victim(incoming, group, ())


class Leaks(LruCache):
    """Broken: goes on naming those that have left."""

    def evicted(self, id: ExpertId, group: int) -> None:
        pass


class Peeks(LruCache):
    """Broken: looks at the future, which it did not declare."""

    def __init__(self, scenario: CacheScenario) -> None:
        super().__init__()
        self._odd = len(scenario.events) % 2 == 1

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        members = sorted(id for id in self._groups.get(group, ()) if id not in blocked)
        return members[-1 if self._odd else 0] if members else None


class Remembers(LruCache):
    """Broken: counts its victims together with those of all its like."""

    chosen = 0

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        Remembers.chosen += 1
        members = sorted(id for id in self._groups.get(group, ()) if id not in blocked)
        return members[Remembers.chosen % len(members)] if members else None


class MakesUp(LruCache):
    """Broken: names somebody where nobody is."""

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return super().victim(incoming, group, blocked) or ExpertId(group, 0)


class Clings(LruCache):
    """Broken: lets nobody go, and does not say so."""

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return None


MEMBERS = "test_victims_and_swaps_are_members_that_may_leave"
DETERMINISM = "test_the_same_calls_give_the_same_answers"
NOBODY = "test_a_blocked_or_empty_group_has_no_victim"
SOMEBODY = "test_there_is_a_victim_whenever_one_member_may_leave"
NO_FORESIGHT = "test_law_7_the_past_decides_alone"


@pytest.mark.parametrize(("broken", "law", "slots", "events", "why"), [
    (lambda _: ForgetsBlocked(), MEMBERS, 1, ({0: 1}, {0: 1}, {0: 1, 1: 1}), "is blocked"),
    (lambda _: Leaks(), MEMBERS, 1, ({0: 1}, {0: 1}, {1: 1}, {0: 1}, {2: 1}), "is no member"),
    (lambda _: Remembers(), DETERMINISM, 2, ({0: 1}, {0: 1}, {1: 1}, {0: 1}, {2: 1}), "the same calls"),
    (lambda _: MakesUp(), NOBODY, 1, (), "is blocked"),
    (lambda _: Clings(), SOMEBODY, 1, ({0: 1},), "may leave, the cache chose None"),
    (Peeks, NO_FORESIGHT, 2, ({0: 1}, {0: 1}, {1: 1}, {0: 1}, {2: 1}, {0: 1}), "other answers"),
])
def test_the_laws_catch_a_broken_cache(
    broken: Callable[[CacheScenario], Cache], law: str, slots: int, events: tuple[dict[int, int], ...], why: str
) -> None:
    class Broken(CacheLaws):
        def fresh(self, scenario: CacheScenario) -> Cache:
            return broken(scenario)

    check = getattr(CacheLaws, law).hypothesis.inner_test
    with pytest.raises(AssertionError, match=why):
        check(Broken(), CacheScenario(events, (slots,) * LAYERS, ()))


COST = costs((1,), (1,))


def fill(cache: Cache, *uses: tuple[int, ...], members: tuple[int, ...] = (0, 1, 2)) -> Cache:
    """A layer of ``members`` that has seen ``uses``."""
    for expert in members:
        cache.admitted(ExpertId(0, expert), 0)
    for step, active in enumerate(uses):
        cache.observe(view(dict.fromkeys(active, 1), COST, step=step))
    return cache


def victim(cache: Cache, *blocked: int) -> int | None:
    chosen = cache.victim(ExpertId(0, 9), 0, {ExpertId(0, expert) for expert in blocked})
    return None if chosen is None else chosen.expert


def test_lru_evicts_the_longest_unused() -> None:
    cache = fill(LruCache(), (0,), (2,), (1,))
    assert [victim(cache), victim(cache, 0), victim(cache, 0, 2), victim(cache, 0, 1, 2)] == [0, 2, 1, None]


def test_lru_counts_an_admission_as_a_use() -> None:
    cache = fill(LruCache(), (0, 1, 2))
    cache.evicted(ExpertId(0, 0), 0)
    cache.admitted(ExpertId(0, 0), 0)
    assert victim(cache) == 1


def test_fifo_evicts_the_first_that_was_admitted_whatever_was_used() -> None:
    cache = fill(FifoCache(), (0,), (0,), (2,))
    assert [victim(cache), victim(cache, 0), victim(cache, 0, 1)] == [0, 1, 2]
    cache.evicted(ExpertId(0, 0), 0)
    cache.admitted(ExpertId(0, 0), 0)
    assert victim(cache) == 1


def test_lfu_evicts_the_least_used_then_the_least_recent_then_the_lowest() -> None:
    assert victim(fill(LfuCache(), (0,), (0, 1), (1,), (2,))) == 2
    assert victim(fill(LfuCache(), (1,), (2,), (0,))) == 1
    assert victim(fill(LfuCache())) == 0


@pytest.mark.parametrize(("given", "expected"), [({}, 1), ({"history": True}, 1), ({"history": False}, 0)])
def test_lfu_remembers_those_that_left_unless_it_has_no_history(given: dict[str, bool], expected: int) -> None:
    cache = fill(LfuCache(**given), (0, 1), (0, 1), (0,), members=(0, 1))
    cache.evicted(ExpertId(0, 0), 0)
    cache.admitted(ExpertId(0, 0), 0)
    assert victim(cache) == expected


def test_random_spares_nobody_and_depends_on_its_seed_alone() -> None:
    draws = [[victim(cache) for _ in range(50)] for cache in (fill(RandomCache(s)) for s in (1, 1, 2))]
    assert draws[0] == draws[1] != draws[2]
    assert set(draws[0]) == {0, 1, 2}


def test_static_neither_admits_nor_evicts() -> None:
    assert not StaticCache().admits
    assert victim(fill(StaticCache())) is None


# --- Belady's caches against exhaustive search, and against every other cache -----------------------------------------


Events = list[frozenset[int]]  # of one layer


class Seated:
    """``slots`` slots in one layer, with these residents."""

    def __init__(self, slots: int, residents: frozenset[int]) -> None:
        self.start = InitialPlacement((slots,), (tuple(sorted(residents)),))

    def place(self, budget: Budget) -> InitialPlacement:
        return self.start


def as_replay(events: Events) -> list[ReplayEvent]:
    return [ReplayEvent(step, 0, "decode", tuple(sorted(event))) for step, event in enumerate(events)]


def future_of(events: Events) -> Future:
    return Future([(step, 0, tuple(sorted(event))) for step, event in enumerate(events)])


def misses(cache: Cache, events: Events, slots: int, residents: frozenset[int] = frozenset()) -> int:
    budget = Budget(experts=8, expert_bytes=(1,), cache_bytes=slots)
    result = replay(as_replay(events), cache, budget, Seated(slots, residents))
    return result.lookups - result.hits


def fewest_misses(events: Events, slots: int, residents: frozenset[int]) -> int:
    """Over all ways to admit and evict, except those that an event uses."""

    @memoise
    def after(place: int, resident: frozenset[int]) -> int:
        if place == len(events):
            return 0
        event = events[place]
        kept, missing = resident & event, event - resident
        return len(missing) + min(
            after(place + 1, kept | stay | come)
            for stay in subsets(resident - event)
            for come in subsets(missing)
            if len(kept) + len(stay) + len(come) <= slots
        )

    return after(0, residents)


def subsets(members: frozenset[int]) -> Iterator[frozenset[int]]:
    for size in range(len(members) + 1):
        yield from map(frozenset, combinations(sorted(members), size))


@st.composite
def runs(draw: st.DrawFn, experts: int, most: int) -> tuple[Events, int, frozenset[int]]:
    """Events of one layer, slots, and who sits in them at first."""
    expert = st.integers(0, experts - 1)
    events = draw(st.lists(st.frozensets(expert, min_size=1, max_size=3), min_size=1, max_size=most))
    slots = draw(st.integers(1, experts - 1))
    return events, slots, draw(st.frozensets(expert, max_size=slots))


@settings(max_examples=examples(100))
@given(runs(experts=5, most=9))
def test_bypass_has_the_fewest_misses_there_can_be(run: tuple[Events, int, frozenset[int]]) -> None:
    events, slots, residents = run
    assert misses(BeladyBypassCache(future_of(events)), events, slots, residents) == fewest_misses(*run)


OTHERS: dict[str, Callable[[Future], Cache]] = {
    "lru": lambda _: LruCache(),
    "lfu": lambda _: LfuCache(),
    "lfu without history": lambda _: LfuCache(history=False),
    "random": lambda _: RandomCache(5),
    "static": lambda _: StaticCache(),
    "window": lambda _: WindowCache(1, 8, 3, 2),
    "belady": BeladyCache,
}


@settings(max_examples=examples(75))
@given(runs(experts=8, most=60))
def test_law_8_belady_with_bypass_never_has_more_misses_than_any_cache(run: tuple[Events, int, frozenset[int]]) -> None:
    events, slots, residents = run
    least = misses(BeladyBypassCache(future_of(events)), events, slots, residents)
    for name, make in OTHERS.items():
        if name != "window":  # brings experts that nobody asked for: its copies are not misses
            assert least <= misses(make(future_of(events)), events, slots, residents), name


def test_evicts_the_farthest_next_use() -> None:
    events = [frozenset({e}) for e in (0, 1, 2, 0, 1, 2, 0)]
    assert misses(LruCache(), events, 2) == 7
    assert misses(BeladyCache(future_of(events)), events, 2) == 5


def test_ties_go_to_the_lowest_id() -> None:
    events = [frozenset({0}), frozenset({1}), frozenset({2})]
    cache = BeladyCache(future_of(events))
    for expert in (0, 1):
        cache.admitted(ExpertId(0, expert), 0)
    replayed = as_replay(events)
    for event in replayed:
        cache.observe(_view(event))
    assert cache.next_use(ExpertId(0, 1)) == cache.next_use(ExpertId(0, 7)) == NEVER
    assert cache.victim(ExpertId(0, 2), 0, ()) == ExpertId(0, 0)


def test_bypass_declines_an_expert_that_is_used_again_no_sooner_than_any_member() -> None:
    cache = BeladyBypassCache(future_of([frozenset({0})]))
    cache.admitted(ExpertId(0, 1), 0)
    assert cache.next_use(ExpertId(0, 1)) == cache.next_use(ExpertId(0, 2)) == NEVER
    assert cache.victim(ExpertId(0, 2), 0, ()) is None
    assert cache.victim(ExpertId(0, 0), 0, ()) == ExpertId(0, 1)


def test_bypass_declines_whoever_is_not_used_sooner() -> None:
    events = [frozenset({0}), frozenset({1}), frozenset({0}), frozenset({1})]
    assert misses(BeladyBypassCache(future_of(events)), events, 1) == 3
    assert misses(BeladyCache(future_of(events)), events, 1) == 4


def test_where_not_all_find_room_those_used_soonest_do() -> None:
    events = [frozenset({0, 1}), frozenset({1}), frozenset({2}), frozenset({2}), frozenset({0})]
    assert misses(BeladyBypassCache(future_of(events)), events, 1) == 4


def test_refuses_a_run_that_leaves_its_future() -> None:
    cache = BeladyCache(future_of([frozenset({0})]))
    with pytest.raises(PolicyError, match=r"event 0: the future has .* the run"):
        cache.observe(_view(ReplayEvent(0, 0, "decode", (3,))))
    cache.observe(_view(ReplayEvent(0, 0, "decode", (0,))))
    with pytest.raises(PolicyError, match="the future ends after 1 events"):
        cache.observe(_view(ReplayEvent(1, 0, "decode", (0,))))


def _view(event: ReplayEvent) -> LayerView:
    return view(dict.fromkeys(event.active, 1), costs((1,), (1,)), step=event.step)


# --- LRU --------------------------------------------------------------------------------------------------------------


def test_within_an_event_hits_come_first_and_the_lower_id_before_the_higher() -> None:
    cache = LruCache()
    for expert in (5, 1, 3):
        cache.admitted(ExpertId(0, expert), 0)
    cache.observe(view({0: 1, 3: 1, 5: 1}, costs([1], [1])))  # 1 is not used, 0 is loaded
    cache.admitted(ExpertId(0, 0), 0)
    left = []
    for _ in range(4):
        victim = cache.victim(ExpertId(0, 9), 0, ())
        assert victim is not None
        left.append(victim.expert)
        cache.evicted(victim, 0)
    assert left == [1, 3, 5, 0]
