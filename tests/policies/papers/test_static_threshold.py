"""The static threshold: how it is composed, and what it tells."""

from __future__ import annotations

import pytest

from policies.papers.hybrimoe.mrs import MrsCache
from policies.parts.placements import PopularityPlacement
from policies.parts.prefetchers import TopPrefetcher
from policies.registry import BuildContext, compose
from tests.kit.views_for_tests import costs
from trilane.testing.strategies import toy_calibration

COST = costs(gpu_ns=(10,) * 9, cpu_ns=tuple(range(30, 300, 30)), copy_ns=100)  # copy + GPU 110: CPU up to 3 tokens


def context(**fields: object) -> BuildContext:
    return BuildContext("toy", 8, 2, top_k=2, calibration=toy_calibration(2, 8, 2), **fields)  # type: ignore[arg-type]


def test_composed_of_popular_residents_gate_prefetches_and_a_score_cache() -> None:
    built = compose("static-threshold", context=context())
    assert isinstance(built.placement, PopularityPlacement)
    assert isinstance(built.prefetcher, TopPrefetcher)
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
