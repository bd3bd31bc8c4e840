"""EdgeMoE: statistical prefetching, decayed counts, and a cache that favours the earlier layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.calibration import Calibration
from policies.mechanism.views import ExpertId
from policies.papers.edgemoe import LayerWeightedLfuCache, StatisticalPrefetcher, decayed_counts, layer_weights
from policies.protocols import Budget, Cache
from policies.registry import BuildContext, ChoiceError, compose
from policies.testing.cache_laws import EXPERTS, LAYERS, CacheLaws, CacheScenario
from tests.kit.views_for_tests import NO_PLAN, costs, view
from trilane.testing.laws import check_all
from trilane.testing.strategies import toy_calibration
from trilane.testing.worlds import World, play_policy, worlds

COST = costs((10,) * 9, (30,) * 9)
FREQUENCY = np.array([[0.5, 0.2, 0.3, 0.0], [0.1, 0.4, 0.1, 0.4]])


def test_counts_are_halved_once_a_sequence() -> None:
    # three past sequences: at the start of the run the first is three sequences old, the last one
    activations = np.array([[[8, 0]], [[4, 4]], [[0, 6]]])
    assert decayed_counts(activations).tolist() == [[8 / 8 + 4 / 4, 4 / 4 + 6 / 2]]


@given(st.lists(st.lists(st.integers(0, 99), min_size=3, max_size=3), min_size=1, max_size=6))
def test_counts_are_what_halving_step_by_step_gives(past: list[list[int]]) -> None:
    counts = [0.0, 0.0, 0.0]
    for sequence in past:
        counts = [count / 2 + tokens for count, tokens in zip(counts, sequence, strict=True)]
    assert decayed_counts(np.array(past)[:, None]).tolist() == [[count / 2 for count in counts]]


def test_weights_of_layers() -> None:
    assert layer_weights(4, 1).tolist() == [1, 0.75, 0.5, 0.25]  # as 4, 3, 2, 1
    assert layer_weights(4, 0.5).tolist() == [1, 0.875, 0.75, 0.625]
    assert layer_weights(3, 0).tolist() == [1, 1, 1]


def fill(cache: Cache, *ids: tuple[int, int]) -> Cache:
    for id in ids:
        cache.admitted(ExpertId(*id), 0)
    return cache


def use(cache: Cache, layer: int, workload: Mapping[int, int]) -> None:
    cache.observe(view(workload, COST, layer=layer))


def leavers(cache: Cache, count: int) -> list[tuple[int, int]]:
    """Who would leave, one after another."""
    gone: list[tuple[int, int]] = []
    for _ in range(count):
        chosen = cache.victim(ExpertId(0, 9), 0, gone)
        assert chosen is not None
        gone.append(tuple(chosen))  # type: ignore[arg-type]
    return gone


@pytest.mark.parametrize(
    ("favour", "expected"),
    [
        (1.0, [(2, 0), (0, 0), (2, 1), (1, 0)]),  # x 3, 2, 1: 6, 8, 4, 7
        (0.1, [(0, 0), (2, 0), (1, 0), (2, 1)]),  # of equally busy experts that of the later layer first
        (0.0, [(0, 0), (1, 0), (2, 0), (2, 1)]),
    ],
)
def test_who_leaves_first_by_how_much_the_earlier_layers_are_favoured(
    favour: float, expected: list[tuple[int, int]]
) -> None:
    counts = np.array([[2.0, 0], [4, 0], [4, 7]])
    cache = fill(LayerWeightedLfuCache(counts, layer_weights(3, favour)), (0, 0), (1, 0), (2, 0), (2, 1))
    assert leavers(cache, 4) == expected


def test_tokens_of_the_run_count_on_top_of_the_calibrated_ones() -> None:
    cache = LayerWeightedLfuCache(np.array([[1.5, 0.5], [3.5, 0]]), layer_weights(2, 1))
    fill(cache, (0, 0), (0, 1), (1, 0))
    assert leavers(cache, 3) == [(0, 1), (0, 0), (1, 0)]  # 0.5, 1.5, 3.5 / 2
    use(cache, 0, {1: 2})  # 2.5
    assert leavers(cache, 3) == [(0, 0), (1, 0), (0, 1)]
    use(cache, 1, {1: 9})  # absent: it counts, too
    cache.admitted(ExpertId(1, 1), 0)
    assert leavers(cache, 4)[-1] == (1, 1)


class TestLayerWeightedLfuLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        counts = decayed_counts(toy_calibration(LAYERS, EXPERTS, 2).activations)
        return LayerWeightedLfuCache(counts, layer_weights(LAYERS, 0.1))


@pytest.mark.parametrize(
    ("size", "among", "resident", "expected"),
    [
        (2, "all", (), [(1, 1), (1, 3)]),
        (2, "all", (1,), [(1, 3)]),
        (2, "all", (1, 3), []),
        (2, "absent", (1,), [(1, 3), (1, 0)]),
        (3, "all", (), [(1, 1), (1, 3), (1, 0)]),
    ],
)
def test_prefetches_the_most_frequent_experts_of_the_next_layer(
    size: int, among: str, resident: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    prefetcher = StatisticalPrefetcher(FREQUENCY, size, among)  # type: ignore[arg-type]
    here = view({0: 1}, COST, resident=[(), resident])
    assert prefetcher.rank(here, (), NO_PLAN) == expected
    assert prefetcher.protect(here, ()) == {ExpertId(1, e) for e in (1, 3, 0)[:size]}


def test_edgemoe_predicts_as_many_as_the_model_chooses() -> None:
    context = BuildContext("toy", 8, 3, 2, calibration=toy_calibration(3, 8, 2))
    built = compose("edgemoe", context=context)
    assert built.parameters["prefetch"] == 2
    assert isinstance(built.prefetcher, StatisticalPrefetcher)
    assert built.prefetcher.size == 2
    assert compose("edgemoe", {"prefetch": 0}, context=context).prefetcher is None
    with pytest.raises(ChoiceError, match=r"favour: expected a number from 0 to 1, got 1\.5"):
        compose("edgemoe", {"favour": 1.5}, context=context)
    with pytest.raises(ChoiceError, match="'edgemoe' needs calibration"):
        compose("edgemoe", context=BuildContext("toy", 8, 3))


@pytest.mark.parametrize(
    ("parameters", "slots", "residents"),
    [
        ({}, None, ((), (0, 1))),  # 6, 4 and 8, 7, halved, x 1 and 0.95
        ({"favour": 1.0}, None, ((0, 1), ())),  # x 1 and 0.5
        ({"pool": False}, (1, 1), ((0,), (0,))),
        ({"start": "empty"}, None, ((), ())),
        ({"start": "empty", "pool": False}, (1, 1), ((), ())),
    ],
)
def test_the_cache_starts_with_the_best_by_its_own_rank(
    parameters: dict[str, object], slots: tuple[int, ...] | None, residents: tuple[tuple[int, ...], ...]
) -> None:
    counts = np.array([[[6, 4, 0], [8, 7, 0]]])
    calibration = Calibration("hand", counts, counts, np.zeros((0, 2, 2), np.int16))
    placement = compose("edgemoe", parameters, context=BuildContext("toy", 3, 2, 2, calibration=calibration)).placement
    placed = placement.place(Budget(3, (10, 10), 20))
    assert (placed.slots, placed.residents) == (slots, residents)


VARIANTS: tuple[dict[str, object], ...] = (
    {}, {"pool": False}, {"among": "absent", "prefetch": 3}, {"start": "empty", "favour": 1.0},
)  # fmt: skip


@pytest.mark.parametrize("parameters", VARIANTS)
@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(world=worlds(["edgemoe"]))
def test_laws_hold_for_every_variant(parameters: Mapping[str, object], world: World) -> None:
    shape = world.trace.shape
    calibration = toy_calibration(shape.moe_layers, shape.experts, shape.top_k)
    context = BuildContext("toy", shape.experts, shape.moe_layers, shape.top_k, calibration=calibration)
    policy = compose("edgemoe", parameters, context=context)
    played = play_policy(policy, world, world.demand(policy.needs))
    check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs)
