"""Mixes: parts by name, and what they need."""

from __future__ import annotations

import pytest

from policies.mechanism.views import Phase
from policies.papers.hybrimoe.mrs import MrsCache
from policies.papers.smoe import CacheRouter, TwoPointer
from policies.parts.caches import FifoCache, LruCache
from policies.parts.placements import Pooled, PopularityPlacement
from policies.parts.prefetchers import TopPrefetcher
from policies.protocols import Composition
from policies.registry import ChoiceError, compose
from policies.system import BuildContext
from tests.kit.views import costs, view
from trilane.testing.worlds import toy_calibration

LAYERS, EXPERTS = 3, 8


def mix(**parameters: object) -> Composition:
    context = BuildContext("toy", EXPERTS, LAYERS, top_k=2, calibration=toy_calibration(LAYERS, EXPERTS, 2))
    return compose("mix", parameters, context=context)


def test_a_mix_needs_what_its_parts_need_and_no_more() -> None:
    plain = mix(prefetch="none").needs
    assert (plain.scores, plain.tokens, plain.calibration, plain.forecasts) == (False, False, False, ())
    assert mix(cache="mrs").needs.scores
    assert mix(cache="mrs", prior=True).needs.calibration
    assert mix(placement="popular").needs.calibration
    assert mix(forecast="residual", lookahead=3).needs.forecasts == (("residual", 1), ("gate", 2), ("gate", 3))
    for split in (mix(assigner=name).needs for name in ("two_pointer", "two_pointer_min")):
        assert (split.scores, split.tokens) == (True, True)
    substituted = mix(substitution=0.1).needs
    assert substituted.changes_routing
    assert not mix().needs.changes_routing


def test_a_cache_may_evict_in_the_order_of_admissions() -> None:
    assert type(mix(cache="fifo").cache) is FifoCache
    assert type(mix(cache="lru").cache) is LruCache


def test_only_staged_prefetches_take_staging_slots() -> None:
    assert mix(into="staging").prefetch_slots == 4
    assert mix(into="cache").prefetch_slots == mix(prefetch="none", into="staging").prefetch_slots == 0


@pytest.mark.parametrize("pool", [False, True])
def test_parts_are_those_of_the_names(pool: bool) -> None:
    made = mix(prefetch="top", forecast="residual", into="staging", placement="popular", pool=pool, substitution=0.25)
    assert isinstance(made.prefetcher, TopPrefetcher)
    assert (made.prefetcher.size, made.prefetcher.kind, made.prefetcher.into) == (2, "residual", "staging")
    assert isinstance(made.router, CacheRouter)
    assert (made.router.alpha, made.router.norm_topk) == (0.25, True)
    placement = made.placement.placement if isinstance(made.placement, Pooled) else made.placement
    assert isinstance(placement, PopularityPlacement)
    assert (isinstance(made.placement, Pooled), placement.uniform) == (pool, not pool)


def test_the_decision_costs_what_the_system_with_that_part_pays() -> None:
    assert mix().decision_cost == "mix"
    assert mix(assigner="exact").decision_cost == "dali-ilp"
    assert mix(prefetch="impact").decision_cost == mix(assigner="simulation").decision_cost == "hybrimoe"
    assert mix(cache="mrs").decision_cost == mix(cache="score-window").decision_cost == "best-exact"
    assert [mix(assigner=name, cache="mrs").decision_cost for name in ("greedy", "beam")] == ["dali", "dali-beam"]


@pytest.mark.parametrize(("name", "sooner"), [("two_pointer", False), ("two_pointer_min", True)])
def test_two_pointers_are_smoe_s(name: str, sooner: bool) -> None:
    assigner = mix(assigner=name).assigner
    assert isinstance(assigner, TwoPointer)
    assert assigner.sooner == sooner


@pytest.mark.parametrize(("phase", "on_gpu"), [("prefill", (1, 2)), ("decode", (1,))])
def test_what_is_absent_may_be_loaded_in_prefill_alone(phase: Phase, on_gpu: tuple[int, ...]) -> None:
    known = view({1: 3, 2: 3}, costs([1] * 3, [1] * 3), ready={1: 0}, phase=phase)
    assert mix(assigner="load-prefill").assigner.assign(known).gpu == on_gpu


@pytest.mark.parametrize(("parameters", "message"), [
    ({"prefetch": "top", "lookahead": 2}, "lookahead: prefetch 'top' expects 1, got 2; it looks at the next"),
    ({"prefetch": "impact", "lookahead": 3, "forecast": "residual"},
     "forecast: prefetch 'impact' with lookahead 3 expects 'gate', got 'residual'"),
    ({"forecast": "token", "lookahead": 2}, "lookahead: forecast 'token' expects 1, got 2; it is of all later"),
    ({"assigner": "exact", "copy_weight": 0.5}, "copy_weight: expects assigner 'pipeline', got 'exact'"),
    ({"background": "prefill"}, "background: expects cache 'mrs', got 'lru'"),
])
def test_what_a_part_would_ignore_is_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ChoiceError) as error:
        mix(**parameters)
    assert message in str(error.value)


@pytest.mark.parametrize("parameters", [
    {"prefetch": "impact", "lookahead": 3},
    {"prefetch": "impact", "forecast": "residual"},
    {"prefetch": "impact", "forecast": "token"},
    {"prefetch": "top", "forecast": "estimator", "into": "staging"},
])
def test_what_a_part_takes_is_not(parameters: dict[str, object]) -> None:
    assert mix(**parameters).prefetcher is not None


@pytest.mark.parametrize(("background", "phase"), [("none", None), ("prefill", "prefill"), ("decode", "decode")])
def test_mrs_may_admit_in_the_background_of_a_phase(background: str, phase: Phase | None) -> None:
    cache = mix(cache="mrs", background=background).cache
    assert isinstance(cache, MrsCache)
    assert cache.background == phase


@pytest.mark.parametrize("pool", [False, True])
def test_in_a_pool_mrs_spares_the_layers_that_a_prompt_has_yet_to_reach(pool: bool) -> None:
    cache = mix(cache="mrs", pool=pool).cache
    assert isinstance(cache, MrsCache)
    assert cache.reached_first == pool


@pytest.mark.parametrize(("parameters", "message"), [
    ({"assigner": "best"}, "assigner: expected 'stay', 'load-all', "),
    ({"alpha": 1.5}, "alpha: expected a number from 0 to 1, got 1.5"),
    ({"substitution": -1}, "substitution: expected a number from 0 to 1, got -1"),
    ({"demand_slots": 0}, "demand_slots: expected a whole number >= 1"),
])
def test_what_there_is_not_is_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ChoiceError) as error:
        mix(**parameters)
    assert message in str(error.value)
