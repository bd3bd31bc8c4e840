"""LRU: the experts of an event are used in id order, those on the GPU before those that are loaded for it."""

from __future__ import annotations

from policies.mechanism.views import ExpertId
from policies.parts.caches import LruCache
from tests.kit.views import costs, view


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
