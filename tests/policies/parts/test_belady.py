"""Belady's caches against exhaustive search, and against every other cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache as memoise
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.mechanism.cache_replay import ReplayEvent, replay
from policies.mechanism.views import ExpertId, LayerView, PolicyError
from policies.papers.dali.parts import WindowCache
from policies.parts.belady import BeladyBypassCache, BeladyCache
from policies.parts.caches import LfuCache, LruCache, RandomCache, StaticCache
from policies.parts.future import NEVER, Future
from policies.protocols import Budget, Cache, InitialPlacement
from tests.kit.depth import examples
from tests.kit.views import costs, view

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
