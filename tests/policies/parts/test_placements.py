"""How placements divide a budget, and whom they seat."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.baselines.oracle import FuturePlacement
from policies.mechanism.views import PolicyError
from policies.parts.future import Future
from policies.parts.placements import (
    LayerWisePlacement,
    NoPlacement,
    PoolPlacement,
    PopularityPlacement,
    RandomPlacement,
    even_slots,
)
from policies.protocols import Budget, InitialPlacement, Placement

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
