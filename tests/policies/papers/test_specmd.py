"""Least-Stale: who leaves one cache over layers that are at work in turn."""

from __future__ import annotations

from policies.mechanism.views import ExpertId
from policies.papers.specmd import LeastStaleCache
from policies.protocols import Cache
from policies.testing.cache_laws import LAYERS, CacheLaws, CacheScenario
from tests.kit.views import costs, view

COST = costs([1], [1])


class TestLeastStaleLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return LeastStaleCache(LAYERS)


def used(cache: LeastStaleCache, step: int, *by_layer: int) -> None:
    """A step of layers that each use one expert, admitted where it is not there."""
    for layer, expert in enumerate(by_layer):
        cache.observe(view({expert: 1}, COST, layer=layer, step=step))
        key = ExpertId(layer, expert)
        if key not in cache._home:
            cache.admitted(key, 0)


def leaving(cache: LeastStaleCache, count: int) -> list[ExpertId]:
    gone = []
    for _ in range(count):
        victim = cache.victim(ExpertId(0, 9), 0, ())
        assert victim is not None
        cache.evicted(victim, 0)
        gone.append(victim)
    return gone


def test_what_the_last_turn_left_unused_goes_first_then_the_layer_that_was_at_work_last() -> None:
    cache = LeastStaleCache(3)
    used(cache, 0, 0, 0, 0)
    used(cache, 1, 1, 0, 1)
    assert leaving(cache, 5) == [ExpertId(2, 0), ExpertId(0, 0), ExpertId(2, 1), ExpertId(1, 0), ExpertId(0, 1)]


def test_within_a_step_the_layers_to_come_are_kept() -> None:
    cache = LeastStaleCache(3)
    used(cache, 0, 0, 0, 0)
    used(cache, 1, 1)  # layer 1 is next
    assert leaving(cache, 4) == [ExpertId(0, 0), ExpertId(0, 1), ExpertId(2, 0), ExpertId(1, 0)]
