"""AdapMoE: cache sizes by dynamic programming, one prefetch, weak experts dropped."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.cache_replay import ReplayEvent, replay
from policies.mechanism.views import LayerView, Routing
from policies.papers.adapmoe import SlotsByMisses, SlotsByMissesFull, WeakExpertsRouter, fewest_misses, lru_misses
from policies.parts.caches import LruCache
from policies.parts.prefetchers import TopPrefetcher
from policies.parts.routers import TrueRouter
from policies.protocols import Budget
from policies.registry import BuildContext, ChoiceError, compose
from tests.kit.toys import toy_trace
from tests.kit.views import costs, view
from trilane.testing.laws import check_all
from trilane.testing.random_worlds import random_world
from trilane.testing.worlds import play_policy, toy_calibration

COST = costs((10,) * 9, (30,) * 9)

# --- misses by number of slots ----------------------------------------------------------------------------------------


def test_misses_by_hand() -> None:
    # One layer, tokens {0, 1}, {1, 2}, {0, 1}. Six uses, three of them first ones. The others: 1 at the second token,
    # than which nobody was more recent; at the third 1, after which came 2 (of the same token, but of higher id), and
    # 0, after which came 1 and 2.
    ids = np.array([[[0, 1]], [[2, 1]], [[1, 0]]], np.int16)
    assert lru_misses(ids, 3).tolist() == [[6, 5, 4, 3]]


def misses_with(tokens: Sequence[Sequence[int]], slots: int) -> int:
    """A cache of ``slots``, most recent first, looked up a token at a time."""
    cache: list[int] = []
    missed = 0
    for token in tokens:
        missed += sum(expert not in cache for expert in token)
        for expert in sorted(token):
            cache = [expert, *(other for other in cache if other != expert)]
        cache = cache[:slots]
    return missed


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[list[list[int]]], int]:
    """[tokens][layers][k] ids, and the number of experts."""
    experts, layers = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    top_k, tokens = draw(st.integers(1, experts)), draw(st.integers(1, 20))
    draw_ids = random.Random(draw(st.integers(0, 999)))
    return [[draw_ids.sample(range(experts), top_k) for _ in range(layers)] for _ in range(tokens)], experts


@given(routings())
def test_misses_are_those_of_a_cache_of_every_size(case: tuple[list[list[list[int]]], int]) -> None:
    ids, experts = case
    curves = lru_misses(np.array(ids, np.int16), experts)
    for layer, curve in enumerate(curves.tolist()):
        mine = [token[layer] for token in ids]
        assert curve == [misses_with(mine, slots) for slots in range(experts + 1)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_with_one_expert_a_token_they_are_those_of_the_cache_itself(uses: list[int]) -> None:
    (curve,) = lru_misses(np.array(uses, np.int16)[:, None, None], 5).tolist()
    events = [ReplayEvent(step, 0, "decode", (expert,)) for step, expert in enumerate(uses)]
    for slots in range(1, 6):
        result = replay(events, LruCache(), Budget(5, (1,), slots))
        assert curve[slots] == result.lookups - result.hits


# --- sizes ------------------------------------------------------------------------------------------------------------


@st.composite
def budgets(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...], int]:
    """Falling curves of up to 4 layers and 4 experts, sizes of experts, and a budget."""
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    falls = st.lists(st.integers(0, 9), min_size=experts + 1, max_size=experts + 1)
    curves = np.array([draw(falls) for _ in range(layers)])[:, ::-1].cumsum(axis=1)[:, ::-1]
    sizes = tuple(draw(st.lists(st.sampled_from((10, 10, 15, 40)), min_size=layers, max_size=layers)))
    return curves, sizes, draw(st.integers(0, sum(sizes) * experts + 20))


@given(budgets())
def test_no_division_of_the_budget_misses_less(case: tuple[np.ndarray, tuple[int, ...], int]) -> None:
    curves, sizes, cache_bytes = case
    layers, counts = curves.shape
    fitting = (
        slots for slots in product(range(counts), repeat=layers)
        if sum(n * size for n, size in zip(slots, sizes, strict=True)) <= cache_bytes
    )
    best = min(sum(int(curves[x, n]) for x, n in enumerate(slots)) for slots in fitting)
    chosen = fewest_misses(curves, sizes, cache_bytes)
    assert sum(n * size for n, size in zip(chosen, sizes, strict=True)) <= cache_bytes
    assert sum(int(curves[x, n]) for x, n in enumerate(chosen)) == best


@given(budgets())
def test_no_slot_that_fits_is_left_over(case: tuple[np.ndarray, tuple[int, ...], int]) -> None:
    curves, sizes, cache_bytes = case
    experts = curves.shape[1] - 1
    placed = SlotsByMisses(curves).place(Budget(experts, sizes, cache_bytes))
    assert placed.slots is not None
    left = cache_bytes - sum(n * size for n, size in zip(placed.slots, sizes, strict=True))
    assert left >= 0
    assert all(count <= experts for count in placed.slots)
    assert all(count == experts or size > left for count, size in zip(placed.slots, sizes, strict=True))
    assert placed.residents == ((),) * len(sizes)


def test_each_layers_most_popular_experts_sit_in_its_slots() -> None:
    curves = np.array([[9, 8, 7, 6], [9, 9, 9, 0], [9, 4, 4, 4]])  # 20 bytes: one slot, none, one
    popularity = np.array([[0.2, 0.5, 0.3], [1, 0, 0], [0.4, 0.2, 0.4]])
    assert SlotsByMissesFull(curves, popularity).place(Budget(3, (10,) * 3, 20)).residents == ((1,), (), (0,))
    full = SlotsByMissesFull(curves, popularity).place(Budget(3, (10,) * 3, 50))
    assert (full.slots, full.residents) == ((1, 3, 1), ((1,), (0, 1, 2), (0,)))


def test_sizes_by_hand() -> None:
    # Layer 0 gains 1 a slot; layer 1 nothing before its third, then 9; layer 2 gains 5 with the first only.
    curves = np.array([[9, 8, 7, 6], [9, 9, 9, 0], [9, 4, 4, 4]])
    assert fewest_misses(curves, (10, 10, 10), 20) == [1, 0, 1]
    assert fewest_misses(curves, (10, 10, 10), 45) == [0, 3, 1]
    assert fewest_misses(curves, (10, 30, 10), 45) == [3, 0, 1]  # layer 1 would need 90
    assert fewest_misses(curves, (10_000_001, 10_000_000, 10_000_001), 45_000_000) == [0, 3, 1]  # in coarser units
    assert fewest_misses(curves, (10_000_001, 10_000_000, 10_000_001), 40_000_000) != [0, 3, 1]  # a byte too many
    flat = SlotsByMisses(np.zeros((3, 4), np.int64)).place(Budget(3, (10, 10, 10), 45))
    assert flat.slots == (2, 1, 1)
    assert SlotsByMisses(np.zeros((2, 3), np.int64)).place(Budget(2, (10, 10), 30)).slots == (2, 1), "to the last byte"
    assert SlotsByMisses(np.zeros((1, 2), np.int64)).place(Budget(1, (1,), 1)).slots == (1,)


# --- weak experts -----------------------------------------------------------------------------------------------------


def weighed(*tokens: dict[int, float]) -> LayerView:
    """A layer of tokens with their experts and weights."""
    ids, weights = [list(token) for token in tokens], [list(token.values()) for token in tokens]
    workload = {expert: sum(expert in token for token in tokens) for token in tokens for expert in token}
    here = view(workload, COST)
    return here._replace(routing=Routing(here.routing.active, here.routing.tokens, ids, weights))


def test_a_weak_second_expert_is_dropped_and_the_first_takes_over_its_weight() -> None:
    here = weighed({3: 0.9, 1: 0.1}, {0: 0.5, 3: 0.5}, {2: 0.75, 1: 0.25})
    routing = WeakExpertsRouter(0.25).route(here)
    assert routing.active == (0, 1, 2, 3)
    assert routing.tokens == (1, 1, 1, 2)
    assert routing.token_ids == [[3], [0, 3], [2, 1]]
    assert [pytest.approx(row) for row in routing.token_weights] == [[1.0], [0.5, 0.5], [0.75, 0.25]]
    gone = WeakExpertsRouter(0.3).route(here)
    assert (gone.active, gone.tokens) == ((0, 2, 3), (1, 1, 2))


def test_the_first_expert_always_stays_and_nothing_changes_without_need() -> None:
    here = weighed({3: 0.2, 1: 0.1, 0: 0.1})
    assert WeakExpertsRouter(0.1).route(here) is here.routing
    assert WeakExpertsRouter(0.25).route(here) is here.routing  # of 0.4 altogether 0.1 is a quarter
    routing = WeakExpertsRouter(0.5).route(here)
    assert (routing.active, routing.tokens, routing.token_ids) == ((3,), (1,), [[3]])
    assert routing.token_weights == [[pytest.approx(0.4)]]


# --- put together -----------------------------------------------------------------------------------------------------

CONTEXT = BuildContext("toy", 8, 3, 2, calibration=toy_calibration(3, 8, 2))


def test_adapmoe_prefetches_one_expert_in_decode_and_keeps_the_routing() -> None:
    built = compose("adapmoe", context=CONTEXT)
    assert isinstance(built.prefetcher, TopPrefetcher)
    assert (built.prefetcher.size, built.prefetcher.into, built.needs.forecast_phases) == (1, "cache", ("decode",))
    assert type(built.router) is TrueRouter
    assert not built.needs.changes_routing


def test_adapmoe_variants_say_what_they_need() -> None:
    dropping = compose("adapmoe", {"drop_below": 0.2}, context=CONTEXT)
    assert (dropping.needs.changes_routing, dropping.needs.tokens) == (True, True)
    plain = compose("adapmoe", {"prefetch": 0}, context=CONTEXT)
    assert (plain.prefetcher, plain.needs.forecasts, plain.needs.tokens) == (None, (), False)
    starts = [compose("adapmoe", {"start": start}, context=CONTEXT).placement for start in ("popular", "empty")]
    counts = [[len(layer) for layer in placement.place(Budget(8, (10,) * 3, 120)).residents] for placement in starts]
    assert (sum(counts[0]), counts[1]) == (12, [0, 0, 0])
    with pytest.raises(ChoiceError, match="prefetch: expected 0 or 1, got 2"):
        compose("adapmoe", {"prefetch": 2}, context=CONTEXT)
    with pytest.raises(ChoiceError, match="'adapmoe' needs calibration"):
        compose("adapmoe", context=BuildContext("toy", 8, 3))


def test_a_calibration_that_decodes_nothing_is_refused() -> None:
    assert CONTEXT.calibration is not None
    silent = replace(CONTEXT.calibration, decode_ids=np.zeros((0, 3, 2), np.int16))
    with pytest.raises(ChoiceError, match="calibration toy has no decode tokens: capture it with generated ones"):
        compose("adapmoe", context=replace(CONTEXT, calibration=silent))


@pytest.mark.parametrize("seed", range(5))
def test_laws_hold_when_experts_are_dropped(seed: int) -> None:
    draw = random.Random(seed)
    trace = toy_trace([[draw.sample(range(8), 2) for _ in range(3)] for _ in range(12)], prompt_tokens=5, experts=8)
    world = random_world("adapmoe", trace, draw)
    policy = compose("adapmoe", {"drop_below": 0.6}, context=CONTEXT)  # weights are 0.5: every second expert goes
    played = play_policy(policy, world, world.demand(policy.needs))
    check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs)
    tokens = [sum(routing.values()) for routing in played.routings.values()]
    assert tokens == [5] * 3 + [1] * 21
