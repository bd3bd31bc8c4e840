"""EdgeMoE: statistical prefetching, decayed counts, and a cache that favours the earlier layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.assigners import LoadAll
from policies.edgemoe import LayerWeightedLfuCache, StatisticalPrefetcher, decayed_counts
from policies.protocols import Cache
from policies.registry import BuildContext, ChoiceError, compose
from policies.views import ExpertId
from tests.conformance.cache_laws import EXPERTS, LAYERS, CacheLaws, Scenario
from tests.invariants.laws import check_all
from tests.invariants.worlds import World, play_policy, worlds
from tests.policies.views_for_tests import costs, view
from tests.strategies import toy_calibration

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


def test_of_equally_busy_experts_those_of_the_later_layer_leave_first() -> None:
    # frequency x (3 - layer): (0, 0) 2 x 3, (1, 0) 4 x 2, (2, 0) 4 x 1, (2, 1) 7 x 1
    cache = fill(LayerWeightedLfuCache(np.array([[2, 0], [4, 0], [4, 7]])), (0, 0), (1, 0), (2, 0), (2, 1))
    assert leavers(cache, 4) == [(2, 0), (0, 0), (2, 1), (1, 0)]


def test_tokens_of_the_run_count_on_top_of_the_calibrated_ones() -> None:
    cache = fill(LayerWeightedLfuCache(np.array([[1.5, 0.5], [3.5, 0]])), (0, 0), (0, 1), (1, 0))
    assert leavers(cache, 3) == [(0, 1), (0, 0), (1, 0)]  # 1, 3, 3.5
    use(cache, 0, {1: 2})  # 2.5 x 2
    assert leavers(cache, 3) == [(0, 0), (1, 0), (0, 1)]
    use(cache, 1, {1: 9})  # absent: it counts, too
    cache.admitted(ExpertId(1, 1), 0)
    assert leavers(cache, 4)[-1] == (1, 1)


class TestLayerWeightedLfuLaws(CacheLaws):
    def fresh(self, scenario: Scenario) -> Cache:
        return LayerWeightedLfuCache(decayed_counts(toy_calibration(LAYERS, EXPERTS, 2).activations))


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
    assert prefetcher.rank(here, (), LoadAll()) == expected
    assert prefetcher.protect(here, ()) == {ExpertId(1, e) for e in (1, 3, 0)[:size]}


def test_edgemoe_predicts_as_many_as_the_model_chooses() -> None:
    context = BuildContext("toy", 8, 3, 2, calibration=toy_calibration(3, 8, 2))
    built = compose("edgemoe", context=context)
    assert built.parameters["prefetch"] == 2
    assert isinstance(built.prefetcher, StatisticalPrefetcher)
    assert built.prefetcher.size == 2
    assert compose("edgemoe", {"prefetch": 0}, context=context).prefetcher is None
    with pytest.raises(ChoiceError, match="'edgemoe' needs calibration"):
        compose("edgemoe", context=BuildContext("toy", 8, 3))


VARIANTS: tuple[dict[str, object], ...] = ({}, {"pool": False}, {"among": "absent", "prefetch": 3})


@pytest.mark.parametrize("parameters", VARIANTS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(world=worlds(["edgemoe"]))
def test_laws_hold_for_every_variant(parameters: Mapping[str, object], world: World) -> None:
    shape = world.trace.shape
    calibration = toy_calibration(shape.moe_layers, shape.experts, shape.top_k)
    context = BuildContext("toy", shape.experts, shape.moe_layers, shape.top_k, calibration=calibration)
    policy = compose("edgemoe", parameters, context=context)
    played = play_policy(policy, world, world.demand(policy.needs))
    check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots)
