"""Logical replay of routing events."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from policies.mechanism.cache_replay import ReplayEvent, ReplayResult, replay
from policies.mechanism.session import Session
from policies.mechanism.views import (
    Assignment,
    ExpertCosts,
    ExpertId,
    Forecast,
    LayerInput,
    LayerView,
    PolicyError,
    Routing,
)
from policies.papers.dali.parts import WindowCache
from policies.parts.assigners import LoadAll
from policies.parts.belady import BeladyBypassCache, BeladyCache
from policies.parts.caches import LfuCache, LruCache, RandomCache, StaticCache
from policies.parts.future import Future
from policies.parts.placements import NoPlacement, RandomPlacement
from policies.protocols import Budget, Cache, Composition, InitialPlacement, Placement


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


# --- Replay against hit rates that an inference engine on a phone recorded with one LRU pool of 4000 MiB --------------


RECORDED = Path(__file__).resolve().parents[4] / "shared" / "traces" / "route_trace_v1"
MIB = 1 << 20


def read(path: Path) -> tuple[tuple[int, ...], int, list[tuple[int, ...]]]:
    """Bytes of an expert by layer, experts a layer, and rows (turn, phase, step, layer, slot, expert)."""
    lines = path.read_text().splitlines()
    header = [dict(part.split("=") for part in line[2:].split() if "=" in part) for line in lines if line[0] == "#"]
    sizes = tuple(int(fields["expert_bytes"]) for fields in header if "expert_bytes" in fields)
    rows = [tuple(map(int, line.split(",")[:6])) for line in lines if line[0].isdigit()]
    return sizes, int(header[1]["n_expert"]), rows


def events_of(rows: list[tuple[int, ...]]) -> list[ReplayEvent]:
    """One event a step and layer, one a layer for the whole prefill; experts in the order in which they appear."""
    events: dict[tuple[int, int, int], dict[int, None]] = {}
    for _, phase, step, layer, _, expert in rows:
        events.setdefault((phase, step if phase else -1, layer), {})[expert] = None
    return [
        ReplayEvent(step, layer, "decode" if phase else "prefill", tuple(active))
        for (phase, step, layer), active in sorted(events.items())
    ]


def replayed(name: str) -> ReplayResult:
    path = RECORDED / f"{name}.route.csv"
    if not path.exists():
        pytest.skip(f"no recorded trace at {path}")
    sizes, experts, rows = read(path)
    return replay(events_of(rows), LruCache(), Budget(experts, sizes, 4000 * MIB))


@pytest.mark.parametrize(
    ("name", "lookups", "hits", "percent"), [("qwen", 39526, 29597, 74.9), ("gemma", 24578, 18872, 76.8)]
)
def test_gives_the_recorded_hit_rate(name: str, lookups: int, hits: int, percent: float) -> None:
    got = replayed(name)
    assert round(100 * got.hit_rate, 1) == percent
    assert (got.lookups, got.hits) == (lookups, hits)  # as recorded, to the single hit


# --- A pool over layers whose experts differ in size ------------------------------------------------------------------


SIZES = (160, 100, 60)  # bytes of an expert, by layer
COSTS = [ExpertCosts((0, 1), (0, 1), 0, 1, size) for size in SIZES]


class Seated(NoPlacement):
    """Expert 0 of layer 0, of 160 bytes, in a pool."""

    def place(self, budget: Budget) -> InitialPlacement:
        return InitialPlacement(None, ((0,), (), ()))


class Ahead:
    """Prefetches one expert of layer 2 into the cache."""

    into = "cache"

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        return [ExpertId(2, 1)]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        return frozenset()


def test_a_prefetch_waits_for_the_victim_whose_room_it_was_promised_to_leave() -> None:
    """Layer 1's load evicts 160 bytes for its 100. Until it starts, its victim is there, and 60 bytes are not free."""
    session = planned(160, Routing((0,), (1,)))
    assert session.next_copy(demand=False) is None
    assert copied(session) == (ExpertId(1, 0), (ExpertId(0, 0),))
    assert copied(session) == (ExpertId(2, 1), ())


def test_a_prefetch_leaves_their_room_to_all_loads_that_start_before_a_victim_leaves() -> None:
    """Layer 1's first load has the 100 bytes that are free, the second evicts 160 for its 100: 60 remain, later."""
    session = planned(260, Routing((0, 1), (1, 1)))
    assert session.next_copy(demand=False) is None
    assert copied(session) == (ExpertId(1, 0), ())
    assert copied(session) == (ExpertId(1, 1), (ExpertId(0, 0),))
    assert copied(session) == (ExpertId(2, 1), ())


def planned(pool_bytes: int, routing: Routing) -> Session:
    """A session whose plan of layer 1 is made; the prefetch for layer 2 is queued."""
    policy = Composition(placement=Seated(), assigner=LoadAll(), prefetcher=Ahead(), cache=LruCache())
    session = Session(policy, Budget(2, SIZES, pool_bytes), COSTS)
    session.begin_step(0)
    session.plan_layer(LayerInput(0, 0, "decode", Routing((0,), (1,))))
    session.foresee(())
    session.end_layer()
    session.plan_layer(LayerInput(0, 1, "decode", routing))
    return session


def copied(session: Session) -> tuple[ExpertId, tuple[ExpertId, ...]]:
    """The next copy, which starts and arrives, and its victims."""
    copy = session.next_copy()
    assert copy is not None
    session.copied(copy)
    return copy.key, copy.victims
