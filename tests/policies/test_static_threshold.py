"""The static threshold: by workload alone, at a number or at the break-even of the costs; and how it is composed."""

from __future__ import annotations

import pytest

from policies.dali import ResidualPrefetcher
from policies.mrs import MrsCache
from policies.placements import PopularityPlacement
from policies.registry import BuildContext, ChoiceError, compose
from policies.static_threshold import ThresholdAssigner, break_even
from tests.policies.views_for_tests import costs, view
from tests.strategies import toy_calibration

COST = costs(gpu_ns=(10,) * 9, cpu_ns=tuple(range(30, 300, 30)), copy_ns=100)  # copy + GPU 110: CPU up to 3 tokens
WORKLOAD = {0: 1, 1: 8, 2: 3, 3: 4, 4: 5}
READY = {0: 0, 1: 0, 4: 70}  # 4 is being copied


def test_above_the_threshold_to_the_gpu_and_what_is_there_stays() -> None:
    got = ThresholdAssigner(4).assign(view(WORKLOAD, COST, ready=READY))
    assert (got.gpu, got.cpu, got.loads) == ((1, 0, 4), (3, 2), ())
    got = ThresholdAssigner(3).assign(view(WORKLOAD, COST, ready=READY))
    assert (got.gpu, got.cpu, got.loads) == ((1, 0, 4, 3), (2,), (3,))


def test_residents_of_small_workload_leave_for_the_cpu_where_all_are_split() -> None:
    got = ThresholdAssigner(4, residents="split").assign(view(WORKLOAD, COST, ready=READY))
    assert (got.gpu, got.cpu, got.loads) == ((1, 4), (3, 2, 0), ())


def test_the_threshold_is_static_whatever_else_the_layer_holds() -> None:
    layers = [{0: 4}, {0: 4, **dict.fromkeys(range(1, 30), 9)}]
    assert [0 in ThresholdAssigner(4).assign(view(workload, COST)).cpu for workload in layers] == [True, True]


def test_without_a_number_it_is_the_break_even_of_each_layer() -> None:
    assert break_even(COST) == 3
    assert break_even(costs((10, 10), (120, 240), copy_ns=100)) == 0
    assert break_even(costs((10, 10), (20, 40), copy_ns=100)) == 2  # never pays
    assert break_even(costs((10, 20), (110, 121), copy_ns=100)) == 1  # at 1 the same: the CPU
    assigner = ThresholdAssigner()
    for layer, cost, loads in ((0, COST, (3,)), (1, COST._replace(copy_ns=1000), ())):
        given = view({2: 3, 3: 4}, cost, layer=layer)
        assert assigner.assign(given).loads == loads


def context(**fields: object) -> BuildContext:
    return BuildContext("toy", 8, 2, top_k=2, calibration=toy_calibration(2, 8, 2), **fields)  # type: ignore[arg-type]


def test_composed_of_popular_residents_gate_prefetches_and_a_score_cache() -> None:
    built = compose("static-threshold", context=context())
    assert isinstance(built.placement, PopularityPlacement)
    assert isinstance(built.prefetcher, ResidualPrefetcher)
    assert (built.prefetcher.kind, built.prefetcher.size, built.prefetcher.into) == ("gate", 1, "cache")
    assert isinstance(built.cache, MrsCache)
    assert (built.cache.keep, built.cache.alpha) == (4, 0.3)
    assert built.needs.scores
    assert compose("static-threshold", {"prefetch": 0}, context=context()).needs.forecasts == ()


@pytest.mark.parametrize(
    ("costs", "given", "expected"),
    [
        ((), {}, None),
        ((COST, COST), {}, 3),
        ((COST, COST._replace(copy_ns=190)), {}, [3, 6]),
        ((COST,), {"theta": 9}, 9),
    ],
)
def test_tells_the_threshold_it_found(costs: object, given: dict[str, object], expected: object) -> None:
    assert compose("static-threshold", given, context=context(costs=costs)).parameters["theta"] == expected


@pytest.mark.parametrize("policy", ["static-threshold", "hybrimoe", "hybrimoe@impl"])
def test_shares_are_shares(policy: str) -> None:
    with pytest.raises(ChoiceError, match=r"parameter 'alpha': expected 0 to 1, got 1\.5"):
        compose(policy, {"alpha": 1.5}, context=context())
