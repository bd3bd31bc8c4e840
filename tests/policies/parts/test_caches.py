"""Every cache obeys the laws; FIFO, LRU, LFU and random do what their names say."""

from __future__ import annotations

from collections.abc import Callable, Container

import pytest

from policies.mechanism.views import ExpertId
from policies.papers.dali.parts import WindowCache
from policies.parts.belady import BeladyBypassCache, BeladyCache
from policies.parts.caches import FifoCache, LfuCache, LruCache, RandomCache, StaticCache
from policies.protocols import Cache
from policies.testing.cache_laws import EXPERTS, LAYERS, CacheLaws, CacheScenario
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
