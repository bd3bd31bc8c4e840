"""HybriMoE composed: what the parameters choose, as published and as released."""

from __future__ import annotations

import pytest

from policies.papers.hybrimoe.mrs import MrsCache
from policies.papers.hybrimoe.prefetch import ImpactPrefetcher
from policies.papers.hybrimoe.schedule import SimulationAssigner
from policies.papers.hybrimoe.system import CacheScorePrefetcher, HssAssigner
from policies.parts.assigners import ByPhase, LoadAll
from policies.parts.placements import PoolPlacement, PopularityPlacement, RandomPlacement
from policies.protocols import Composition
from policies.registry import BuildContext, ChoiceError, compose
from trilane.testing.strategies import toy_calibration


def built(name: str = "hybrimoe", **parameters: object) -> Composition:
    return compose(name, parameters, context=BuildContext("toy", 64, 3, top_k=6))


def test_as_published() -> None:
    policy = built()
    assert isinstance(policy.placement, RandomPlacement)
    assert isinstance(policy.assigner, SimulationAssigner)
    assert isinstance(policy.prefetcher, ImpactPrefetcher)
    assert isinstance(policy.cache, MrsCache)
    assert policy.prefetcher.schedule is policy.assigner.schedule
    assert (policy.assigner.schedule.rule, policy.assigner.schedule.guard) == ("finish", True)
    assert (policy.prefetcher.size, policy.prefetcher.discount, policy.prefetcher.pooled) == (4, 1.0, False)
    assert policy.prefetcher.arrival
    assert (policy.cache.keep, policy.cache.alpha, policy.cache.tokens) == (12, 0.3, "mean")
    assert policy.needs.forecasts == (("gate", 1), ("gate", 2), ("gate", 3))


def test_parameters_choose_the_readings() -> None:
    policy = built(rule="device_free", guard=False, prefetch=2, lookahead=1, discount=0.5, pool=True, keep=3)
    assert isinstance(policy.placement, PoolPlacement)
    assert isinstance(policy.assigner, SimulationAssigner)
    assert isinstance(policy.prefetcher, ImpactPrefetcher)
    assert isinstance(policy.cache, MrsCache)
    assert (policy.assigner.schedule.rule, policy.assigner.schedule.guard) == ("device_free", False)
    assert (policy.prefetcher.size, policy.prefetcher.discount, policy.prefetcher.pooled) == (2, 0.5, True)
    assert (policy.cache.keep, policy.needs.forecasts) == (3, (("gate", 1),))
    unhurried = built(arrival=False).prefetcher
    assert isinstance(unhurried, ImpactPrefetcher)
    assert not unhurried.arrival
    without = built(prefetch=0)
    assert (without.prefetcher, without.needs.forecasts) == (None, ())


def test_as_released() -> None:
    policy = built("hybrimoe@impl")
    assert isinstance(policy.assigner, ByPhase)
    assert isinstance(policy.assigner.prefill, LoadAll)
    assert isinstance(policy.assigner.decode, HssAssigner)
    assert isinstance(policy.cache, MrsCache)
    assert (policy.cache.keep, policy.cache.alpha, policy.cache.tokens) == (12, 0.5, "first")
    assert policy.prefetcher is None
    prefetcher = built("hybrimoe@impl", prefetch_size=2).prefetcher
    assert isinstance(prefetcher, CacheScorePrefetcher)
    assert (prefetcher.size, prefetcher.into) == (2, "cache")


@pytest.mark.parametrize(("name", "value"), [("discount", 2.0), ("lookahead", 4), ("rule", "latest"), ("prefetch", -1)])
def test_refuses_what_makes_no_sense(name: str, value: object) -> None:
    with pytest.raises(ChoiceError, match=f"{name}: expected"):
        built(**{name: value})


def test_its_cache_may_start_with_popular_experts_and_bring_others_in_the_background() -> None:
    context = BuildContext("toy", 64, 3, top_k=6, calibration=toy_calibration(3, 64, 6))
    parameters = {"start": "popular", "background": True, "admit_by_score": True}
    policy = compose("hybrimoe", parameters, context=context)
    assert isinstance(policy.placement, PopularityPlacement)
    assert policy.placement.uniform
    assert policy.needs.calibration
    assert isinstance(policy.cache, MrsCache)
    assert (policy.cache.background, policy.cache.by_score) == ("decode", True)
    with pytest.raises(ChoiceError, match="'popular' fills slots by layer; leave 'pool'"):
        built(start="popular", pool=True)
