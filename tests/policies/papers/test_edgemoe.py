"""EdgeMoE: prefetching by the experts of the layers before, and a cache by frequency and distance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.calibration import Calibration
from policies.mechanism.views import ExpertId, LayerView
from policies.papers.edgemoe import ActivationProfile, DistanceLfuCache, ProfilePrefetcher
from policies.protocols import Budget, Cache
from policies.registry import BuildContext, ChoiceError, compose
from policies.testing.cache_laws import EXPERTS, LAYERS, CacheLaws, CacheScenario
from tests.kit.views import NO_PLAN, costs, view
from trilane.testing.laws import check_all
from trilane.testing.random_worlds import worlds
from trilane.testing.worlds import World, play_policy, toy_calibration

COST = costs((10,) * 9, (30,) * 9)


def test_an_expert_is_as_likely_as_after_the_same_pairs() -> None:
    # two calibrated tokens, one expert each in three layers: 0 -> 1 -> 2 and 0 -> 2 -> 3
    profile = ActivationProfile(ids([[0], [1], [2]], [[0], [2], [3]]), 4)
    assert profile.workloads(1, [[0]]).tolist() == [0, 0.5, 0.5, 0]  # of layer 0 alone
    assert profile.workloads(2, [[1]], [[0]]).tolist() == [0, 0, 1, 0]
    assert profile.workloads(2, [[1], [2], [2]], [[0], [0], [0]]).tolist() == [0, 0, 1, 2]  # of a batch: tokens
    assert profile.workloads(2, [[1], [3]], [[1], [0]]).tolist() == [0, 0, 0, 0]  # no such pair was seen


def test_all_pairs_of_a_token_count_alike() -> None:
    profile = ActivationProfile(ids([[0, 1], [0, 1], [2, 3]], [[0, 2], [0, 3], [1, 2]]), 4)
    # the first token shares all four pairs, the second one, 0 and 0
    assert profile.workloads(2, [[0, 1]], [[0, 1]]).tolist() == [0, 1 / 5, 1, 4 / 5]


@given(st.data())
def test_workloads_are_those_of_a_dictionary(data: st.DataObject) -> None:
    """The reference: a dictionary by pairs, as the paper has it, asked pair by pair."""
    chosen = st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True)
    tokens = st.lists(st.lists(chosen, min_size=3, max_size=3), min_size=1, max_size=8)
    seen, asked = data.draw(tokens), data.draw(tokens)
    counts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for one in seen:
        for pair in product(one[0], one[1]):
            counts[pair] += one[2]
    expected = np.zeros(5)
    for one in asked:
        found = [e for pair in product(one[0], one[1]) for e in counts[pair]]
        for expert in found:
            expected[expert] += 2 / len(found)
    profile = ActivationProfile(np.array(seen, np.int16), 5)
    got = profile.workloads(2, [one[1] for one in asked], [one[0] for one in asked])
    assert got.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("batch", ["tokens", "together"])
def test_a_batch_is_looked_up_token_by_token_or_by_its_active_experts(batch: str) -> None:
    # after 0: expert 2 in half of the cases, after 1: always 3. Three tokens use 0, one uses 1
    profile = ActivationProfile(ids([[0], [2]], [[0], [2]], [[0], [1]], [[1], [3]]), 4, together=batch == "together")
    expected = {"tokens": [0, 1, 2, 1], "together": [0, 1 / 4, 2 / 4, 1 / 4]}
    assert profile.workloads(1, [[0], [0], [0], [1]]).tolist() == expected[batch]
    # of (0, 2) and (1, 3) alike, whoever used them: three tokens of the one, one of the other
    crossed = ActivationProfile(ids([[0], [2], [2]], [[0], [3], [1]], [[1], [3], [3]]), 4, together=batch == "together")
    used = crossed.workloads(2, [[2], [2], [2], [3]], [[0], [0], [0], [1]])
    assert used.tolist() == ([0, 0, 3, 1] if batch == "tokens" else [0, 1 / 3, 1 / 3, 1 / 3])


def test_of_one_token_the_active_experts_are_those_that_it_used() -> None:
    chosen = ids([[0, 1], [0, 1], [2, 3]], [[0, 2], [0, 3], [1, 2]])
    one, all_of_it = ActivationProfile(chosen, 4), ActivationProfile(chosen, 4, together=True)
    assert one.workloads(2, [[0, 1]], [[0, 1]]).tolist() == all_of_it.workloads(2, [[0, 1]], [[0, 1]]).tolist()


def test_a_long_prompt_is_looked_up_piece_by_piece() -> None:
    profile = ActivationProfile(ids([[0], [1]]), 2)
    assert profile.workloads(1, [[0]] * 1000).tolist() == [0, 1000]


def ids(*tokens: list[list[int]]) -> np.ndarray:
    """[tokens, layers, k]."""
    return np.array(tokens, np.int16)


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


@pytest.mark.parametrize(("at_work", "expected"), [
    (0, [(0, 0), (2, 0), (2, 1), (1, 0)]),  # 2 / 3, 4 / 2, 7 / 2, 4
    (1, [(0, 0), (1, 0), (2, 0), (2, 1)]),  # 2 / 2, 4 / 3, 4, 7
    (2, [(2, 0), (0, 0), (1, 0), (2, 1)]),  # 4 / 3, 2, 4 / 2, 7 / 3
])
def test_who_leaves_first_by_the_layer_at_work(at_work: int, expected: list[tuple[int, int]]) -> None:
    cache = fill(DistanceLfuCache(np.array([[2, 0], [4, 0], [4, 7]])), (0, 0), (1, 0), (2, 0), (2, 1))
    use(cache, at_work, {})
    assert leavers(cache, 4) == expected


def test_tokens_of_the_run_count_on_top_of_the_calibrated_ones() -> None:
    cache = fill(DistanceLfuCache(np.array([[2, 1], [5, 0]])), (0, 0), (0, 1), (1, 0))
    use(cache, 1, {})
    assert leavers(cache, 3) == [(0, 1), (0, 0), (1, 0)]  # 1, 2, 5 / 2
    use(cache, 0, {1: 4})  # 5 / 2; 2 / 2, 5
    assert leavers(cache, 3) == [(0, 0), (0, 1), (1, 0)]
    use(cache, 1, {1: 99})  # absent: it counts, too
    cache.admitted(ExpertId(1, 1), 0)
    assert leavers(cache, 4)[-1] == (1, 1)


def test_nobody_leaves_an_empty_cache() -> None:
    assert DistanceLfuCache(np.array([[1, 2]])).victim(ExpertId(0, 0), 0, ()) is None


class TestDistanceLfuLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return DistanceLfuCache(toy_calibration(LAYERS, EXPERTS, 2).activations.sum(axis=0))


LIKELY = ids([[0], [1], [0]], [[0], [1], [0]], [[0], [3], [0]], [[0], [3], [1]], [[0], [3], [1]], [[0], [0], [2]])


@pytest.mark.parametrize(("size", "among", "resident", "expected"), [
    (2, "all", (), [(1, 3), (1, 1)]),
    (2, "all", (1,), [(1, 3)]),
    (2, "all", (1, 3), []),
    (2, "absent", (1,), [(1, 3), (1, 0)]),
    (4, "all", (), [(1, 3), (1, 1), (1, 0)]),  # no token used expert 2
])
def test_prefetches_the_likeliest_experts_of_the_next_layer(
    size: int, among: Literal["all", "absent"], resident: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    prefetcher = ProfilePrefetcher(ActivationProfile(LIKELY, 4), size, among)
    here = at_layer(0, [0], resident)
    assert prefetcher.rank(here, (), NO_PLAN) == expected
    assert prefetcher.protect(here, ()) == {ExpertId(1, e) for e in (3, 1, 0)[:size]}


def test_two_layers_of_the_same_step_are_the_key() -> None:
    prefetcher = ProfilePrefetcher(ActivationProfile(LIKELY, 4), 1)
    prefetcher.rank(at_layer(0, [0]), (), NO_PLAN)
    assert prefetcher.rank(at_layer(1, [1]), (), NO_PLAN) == [(2, 0)]
    assert prefetcher.rank(at_layer(1, [3]), (), NO_PLAN) == [(2, 1)]  # another step: of the layer before alone


def at_layer(layer: int, experts: list[int], resident: tuple[int, ...] = ()) -> LayerView:
    """One token."""
    here = view(dict.fromkeys(experts, 1), COST, layer=layer, resident=[(), resident, ()])
    return here._replace(routing=here.routing._replace(token_ids=[experts]))


def test_edgemoe_predicts_as_many_as_the_model_chooses() -> None:
    context = BuildContext("toy", 8, 3, 2, calibration=toy_calibration(3, 8, 2))
    built = compose("edgemoe", context=context)
    assert built.parameters["prefetch"] == 2
    assert isinstance(built.prefetcher, ProfilePrefetcher)
    assert built.prefetcher.size == 2
    assert compose("edgemoe", {"prefetch": 0}, context=context).prefetcher is None
    with pytest.raises(ChoiceError, match="'edgemoe' needs calibration"):
        compose("edgemoe", context=BuildContext("toy", 8, 3))


@pytest.mark.parametrize(("parameters", "slots", "residents"), [
    ({}, None, ((), (0, 1))),  # of 6, 4 and 8, 7
    ({"pool": False}, (1, 1), ((0,), (0,))),
    ({"start": "empty"}, None, ((), ())),
    ({"start": "empty", "pool": False}, (1, 1), ((), ())),
])
def test_the_cache_starts_with_the_best_by_its_own_rank(
    parameters: dict[str, object], slots: tuple[int, ...] | None, residents: tuple[tuple[int, ...], ...]
) -> None:
    counts = np.array([[[6, 4, 0], [8, 7, 0]]])
    calibration = Calibration("hand", counts, counts, np.zeros((0, 2, 2), np.int16))
    placement = compose("edgemoe", parameters, context=BuildContext("toy", 3, 2, 2, calibration=calibration)).placement
    placed = placement.place(Budget(3, (10, 10), 20))
    assert (placed.slots, placed.residents) == (slots, residents)


VARIANTS: tuple[dict[str, object], ...] = (
    {}, {"pool": False}, {"among": "absent", "prefetch": 3}, {"start": "empty"}, {"batch": "together"},
)


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
