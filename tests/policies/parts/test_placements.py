"""How placements divide a budget, and whom they seat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.baselines.oracle import FuturePlacement
from policies.calibration import Calibration
from policies.mechanism.views import ExpertId, Forecast, PolicyError, Routing
from policies.papers.daop import PredictingRouter
from policies.papers.smoe import CacheRouter
from policies.papers.speculating_experts import SpeculativeRouter
from policies.parts.future import Future
from policies.parts.lazy_heap import LazyHeap
from policies.parts.placements import (
    LayerWisePlacement,
    NoPlacement,
    PoolPlacement,
    PopularityPlacement,
    RandomPlacement,
    even_slots,
)
from policies.parts.routers import combine_weights, routing_of_tokens, scores_by_expert
from policies.protocols import Budget, InitialPlacement, Placement
from policies.registry import BuildContext, compose
from trilane.testing.worlds import toy_calibration

POPULARITY = np.array([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])


def budget(cache_bytes: int, expert_bytes: tuple[int, ...] = (10, 10, 10), **fields: object) -> Budget:
    return Budget(4, expert_bytes, cache_bytes, POPULARITY, **fields)  # type: ignore[arg-type]


def test_even_slots_give_what_is_left_to_the_first_layers_that_it_fits() -> None:
    assert even_slots(budget(70)) == [3, 2, 2]
    assert even_slots(budget(58, (10, 30, 5))) == [2, 1, 1]
    assert even_slots(budget(10_000)) == [4, 4, 4]
    assert even_slots(budget(0)) == [0, 0, 0]


def test_no_placement_and_pool_seat_nobody() -> None:
    assert NoPlacement().place(budget(30)) == InitialPlacement((1, 1, 1), ((), (), ()))
    assert PoolPlacement().place(budget(30)) == InitialPlacement(None, ((), (), ()))


def test_random_depends_on_its_seed() -> None:
    by_seed = [RandomPlacement(seed).place(budget(60)) for seed in (1, 1, 2)]
    assert by_seed[0] == by_seed[1] != by_seed[2]
    assert [len(layer) for layer in by_seed[0].residents] == [2, 2, 2]


def test_layer_wise_fills_whole_layers_from_the_last() -> None:
    full = (0, 1, 2, 3)
    assert LayerWisePlacement().place(budget(119)) == InitialPlacement((0, 4, 4), ((), full, full))
    assert LayerWisePlacement().place(budget(39)).slots == (0, 0, 0)


def test_popularity_over_the_whole_model() -> None:
    assert PopularityPlacement().place(budget(50)) == InitialPlacement((2, 1, 2), ((1, 2), (0,), (0, 1)))


def test_popularity_with_even_slots_gives_what_is_left_to_the_best_runner_up() -> None:
    placed = PopularityPlacement(uniform=True).place(budget(50))
    assert placed == InitialPlacement((2, 1, 2), ((1, 2), (0,), (0, 1)))
    assert PopularityPlacement(uniform=True).place(budget(40)).residents == ((1, 2), (0,), (0,))


def test_popularity_must_be_there_and_fit() -> None:
    with pytest.raises(PolicyError, match="calibration prompts"):
        PopularityPlacement().place(Budget(4, (10,), 40))
    with pytest.raises(PolicyError, match=r"expected shape \(1, 4\), got \(3, 4\)"):
        PopularityPlacement().place(Budget(4, (10,), 40, POPULARITY))


def test_the_oracle_seats_whoever_is_used_first() -> None:
    future = Future([(0, 0, (3,)), (0, 1, (1, 2)), (0, 2, (0,)), (1, 0, (0, 1))])
    assert FuturePlacement(future).place(budget(40)).residents == ((0, 3), (1,), (0,))
    pooled = FuturePlacement(future, pool=True).place(budget(30))
    assert pooled == InitialPlacement(None, ((3,), (1, 2), ()))


ALL: list[Placement] = [
    NoPlacement(),
    RandomPlacement(0),
    LayerWisePlacement(),
    PopularityPlacement(),
    PopularityPlacement(uniform=True),
    FuturePlacement(Future([(0, layer, (0, 1, 2, 3)) for layer in range(3)])),
]


@given(st.integers(0, 300), st.tuples(*[st.integers(1, 20)] * 3), st.sampled_from(ALL))
def test_every_placement_fits_its_budget(cache_bytes: int, expert_bytes: tuple[int, ...], placement: Placement) -> None:
    placed = placement.place(budget(cache_bytes, expert_bytes))
    assert placed.slots is not None
    assert sum(n * size for n, size in zip(placed.slots, expert_bytes, strict=True)) <= cache_bytes
    assert all(count <= 4 for count in placed.slots)
    for count, layer in zip(placed.slots, placed.residents, strict=True):
        assert len(layer) <= count
        assert list(layer) == sorted(set(layer))


# --- Popularity by calibration, and what stands in where nothing was decoded ------------------------------------------


PROMPT = np.array([[[3, 1]], [[2, 2]]])


def counted(decoded: np.ndarray) -> Calibration:
    return Calibration("hand", PROMPT + decoded, decoded, np.zeros((0, 1, 1), np.int16))


def test_decode_popularity_is_of_decode_tokens() -> None:
    found = counted(np.array([[[0, 1]], [[0, 3]]]))
    assert found.decode_popularity.tolist() == [[0, 1]]
    assert found.popularity.tolist() == [[5 / 12, 7 / 12]]


def test_without_decode_tokens_those_of_the_prompts_count() -> None:
    found = counted(np.zeros_like(PROMPT))
    assert found.decode_popularity.tolist() == found.popularity.tolist() == [[5 / 8, 3 / 8]]


def test_a_layer_of_one_pair_is_all_its_expert_s_and_one_without_any_nobody_s() -> None:
    counts = np.array([[[0, 1], [0, 0]]])
    found = Calibration("hand", counts, counts, np.zeros((0, 2, 1), np.int16))
    assert found.popularity.tolist() == [[0, 1], [0, 0]]


# --- LazyHeap ---------------------------------------------------------------------------------------------------------


_IDS = st.tuples(st.integers(0, 1), st.integers(0, 4)).map(lambda pair: ExpertId(*pair))
_TOLD = st.one_of(_IDS, st.frozensets(_IDS), st.dictionaries(_IDS, st.integers(-3, 3)))  # leaves; blocked; ranks


@given(st.lists(_TOLD, max_size=60))
def test_the_lowest_is_the_least_of_all_members_that_are_not_blocked(told: list[object]) -> None:
    ranking, members = LazyHeap(), dict[ExpertId, float]()
    for what in told:
        if isinstance(what, ExpertId) and what in members:
            ranking.drop(what)
            del members[what]
        elif isinstance(what, frozenset):
            free = [id for id in members if id not in what]
            assert ranking.lowest(what) == min(free, key=lambda id: (members[id], id), default=None)
        elif isinstance(what, dict):
            known = {id: rank for id, rank in what.items() if id in members}
            ranking.change(known)
            for id in what.keys() - known.keys():
                ranking.put(id, what[id])
            members.update(what)


# --- Routing that policies make up ------------------------------------------------------------------------------------


def test_tokens_are_counted_by_expert() -> None:
    ids, weights = [(3, 1), (3, 0)], [(0.6, 0.4), (0.5, 0.5)]
    assert routing_of_tokens(ids, weights) == Routing((0, 1, 3), (1, 1, 2), ids, weights)


@pytest.mark.parametrize(("scores", "norm_topk", "weights"), [
    ((0.5, 0.125, 0.375), True, [0.75, 0.25]),  # of 0.375 and 0.125
    ((0.5, 0.125, 0.375), False, [0.375, 0.125]),
    ({1: 0.125, 2: 0.375}, True, [0.75, 0.25]),
    ({}, True, [0.5, 0.5]),
    ((), False, [0.5, 0.5]),
    ((1.0, 0.0, 0.0), True, [0.5, 0.5]),  # scores too small for their 16 bits
    ((1.0, 0.0, 0.0), False, [0.0, 0.0]),
])
def test_weights_of_experts_2_and_1(
    scores: tuple[float, ...] | dict[int, float], norm_topk: bool, weights: list[float]
) -> None:
    assert combine_weights(scores, (2, 1), norm_topk) == weights


def test_scores_by_expert() -> None:
    forecast = Forecast(1, "gate", (), (), [(2, 0), (1, 2)])
    assert scores_by_expert(forecast) == [{}, {}]
    assert scores_by_expert(forecast._replace(token_scores=[(0.5, 0.25), (0.75, 0.125)])) == [
        {2: 0.5, 0: 0.25}, {1: 0.75, 2: 0.125},
    ]


@pytest.mark.parametrize("name", ["smoe", "daop", "daop@impl", "router-pf", "hybrid-pf", "quasi-pf@impl"])
@pytest.mark.parametrize("norm_topk", [True, False])
def test_who_makes_up_routing_does_it_in_the_models_way(name: str, norm_topk: bool) -> None:
    recalls = {("quasi_hidden", 1): [0.9] * 3}
    calibration = replace(toy_calibration(3, 8, 2), recalls=recalls)
    context = BuildContext("toy", 8, 3, top_k=2, calibration=calibration, norm_topk=norm_topk)
    router = compose(name, context=context).router
    assert isinstance(router, CacheRouter | PredictingRouter | SpeculativeRouter)
    assert router.norm_topk is norm_topk
