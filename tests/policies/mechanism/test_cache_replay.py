"""Logical replay of routing events."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from policies.mechanism.cache_replay import ReplayEvent, replay
from policies.mechanism.views import PolicyError
from policies.papers.dali.parts import WindowCache
from policies.parts.belady import BeladyBypassCache, BeladyCache
from policies.parts.caches import LfuCache, LruCache, RandomCache, StaticCache
from policies.parts.future import Future
from policies.parts.placements import NoPlacement, RandomPlacement
from policies.protocols import Budget, Cache, InitialPlacement, Placement


def of_one_layer(*events: tuple[int, ...]) -> list[ReplayEvent]:
    return [ReplayEvent(step, 0, "decode", event) for step, event in enumerate(events)]


def hits(cache: Cache, events: list[ReplayEvent], slots: int, placement: Placement | None = None) -> int:
    return replay(events, cache, Budget(8, (10,), 10 * slots), placement).hits


def test_an_event_is_looked_up_together_and_keeps_what_it_uses() -> None:
    assert hits(LruCache(), of_one_layer((1,), (2,), (0, 1)), slots=2) == 1


def test_what_finds_no_room_passes_through() -> None:
    assert hits(LruCache(), of_one_layer((0, 1, 2), (0, 1, 2)), slots=2) == 2
    assert hits(LruCache(), of_one_layer((0,), (0,)), slots=0) == 0


# Thirty accesses of four experts, with two slots: what each cache hits, worked out by hand.
TOY = of_one_layer(
    (0, 1), (0, 1), (2,), (0, 1), (0, 2), (3,), (0,), (0, 1), (1, 3), (1,),
    (2, 3), (0,), (0, 1), (0, 1), (3,), (0, 1), (2,), (2,), (0, 1),
)


def test_thirty_accesses() -> None:
    assert sum(len(event.active) for event in TOY) == 30
    future = Future([(e.step, e.layer, e.active) for e in TOY])
    got = {
        "lru": hits(LruCache(), TOY, slots=2),
        "lfu": hits(LfuCache(), TOY, slots=2),
        "belady": hits(BeladyCache(future), TOY, slots=2),
        "bypass": hits(BeladyBypassCache(future), TOY, slots=2),
    }
    assert got == {"lru": 14, "lfu": 15, "belady": 15, "bypass": 19}


def test_a_pool_lets_layers_compete_and_counts_bytes() -> None:
    events = [ReplayEvent(0, 0, "decode", (0,)), ReplayEvent(0, 1, "decode", (0,)), ReplayEvent(1, 0, "decode", (0,))]
    budget = Budget(2, (10, 25), 30)
    assert replay(events, LruCache(), budget).hits == 0  # 10 + 25 do not fit 30: the second event evicts the first
    assert replay(events, LruCache(), Budget(2, (10, 25), 35)).hits == 1
    assert replay(events, LruCache(), Budget(2, (10, 25), 35), NoPlacement()).hits == 1


def test_several_leave_for_a_large_one_or_none_does() -> None:
    small = [ReplayEvent(0, 0, "decode", (0, 1)), ReplayEvent(0, 1, "decode", (0,)), ReplayEvent(1, 1, "decode", (0,))]
    assert replay(small, LruCache(), Budget(2, (10, 25), 30)).hits == 1
    too_large = [*small, ReplayEvent(2, 0, "decode", (0,))]
    assert replay(too_large, LruCache(), Budget(2, (10, 35), 30)).hits == 1  # layer 0's stay, layer 1's pass through


def test_phases_are_counted_apart() -> None:
    prefill = ReplayEvent(0, 0, "prefill", (0, 1))
    events = [prefill, ReplayEvent(1, 0, "decode", (1,)), ReplayEvent(2, 0, "decode", (3,))]
    got = replay(events, LruCache(), Budget(4, (1,), 2))
    assert (got.lookups, got.hits, got.lookups_decode, got.hits_decode) == (4, 1, 2, 1)
    assert (got.hit_rate, got.hit_rate_decode) == (0.25, 0.5)


def test_a_warm_start_hits_and_must_fit() -> None:
    assert hits(StaticCache(), of_one_layer(tuple(range(8))), 3, RandomPlacement(0)) == 3

    class TooMany:
        def place(self, budget: Budget) -> InitialPlacement:
            return InitialPlacement((1,), ((0, 1),))

    with pytest.raises(PolicyError, match="no slot of its own for expert 1 of layer 0"):
        hits(StaticCache(), [], 1, TooMany())


def test_swaps_are_carried_out() -> None:
    class Zero:
        def place(self, budget: Budget) -> InitialPlacement:
            return InitialPlacement((1,), ((0,),))

    events = of_one_layer((5,), (5,), (5,), (5,))
    assert hits(WindowCache(1, 8, window=2, update=1), events, 1, Zero()) == 2


def skewed(steps: int, layers: int, experts: int, top_k: int) -> list[ReplayEvent]:
    """A few experts are popular, and half of a step's experts come again in the next."""
    draw = random.Random(7)
    weights = [1 / rank**0.8 for rank in range(1, experts + 1)]
    last = [list(range(top_k)) for _ in range(layers)]
    events = []
    for step in range(steps):
        for layer in range(layers):
            again = [e for e in last[layer] if draw.random() < 0.5]
            others = draw.choices(range(experts), weights, k=4 * top_k)
            last[layer] = list(dict.fromkeys(again + others))[:top_k]
            events.append(ReplayEvent(step, layer, "decode", tuple(sorted(last[layer]))))
    return events


CACHES: dict[str, Callable[[Future], Cache]] = {
    "lru": lambda _: LruCache(),
    "lfu": lambda _: LfuCache(),
    "random": lambda _: RandomCache(0),
    "belady": BeladyCache,
    "belady-bypass": BeladyBypassCache,
}
