"""SMoE's prefetches, and what its parameters put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from policies.mechanism.views import ExpertId, Forecast, LayerView, PolicyError, ResidencyView
from policies.papers.smoe import TopScorePrefetcher
from policies.parts.assigners import LoadAll
from policies.parts.placements import Pooled, PopularityPlacement, RandomPlacement
from policies.parts.routers import TrueRouter
from policies.registry import BuildContext, ChoiceError, compose, system
from tests.kit.views_for_tests import NO_PLAN
from tests.kit.views_with_scores import scored_view
from trilane.testing.strategies import toy_calibration

SCORES = (0.4, 0.3, 0.2, 0.1)


def ranked(
    *tokens: tuple[Sequence[int], Sequence[float]], alpha: float = 0.25, resident: Sequence[int] = ()
) -> list[int]:
    forecast = Forecast(1, "partial", (), (), [ids for ids, _ in tokens], [scores for _, scores in tokens])
    prefetcher = TopScorePrefetcher(alpha)
    view = view_of_two(len(tokens), resident)
    top = prefetcher.protect(view, [forecast])
    wanted = prefetcher.rank(view, [forecast], NO_PLAN)
    assert set(wanted) == {id for id in top if id.expert not in resident}
    assert {id.layer for id in top} <= {1}
    return [id.expert for id in wanted]


def view_of_two(tokens: int, resident: Sequence[int] = ()) -> LayerView:
    """Layer 0, k = 2; who is resident in layer 1."""
    view = scored_view([SCORES] * tokens, 2)
    return view._replace(residency=ResidencyView([(), resident], [(), ()]))


def test_top_score_experts_that_are_absent_by_descending_score() -> None:
    # k = 2: the third best bounds, times 1.25.
    assert ranked(((3, 1, 0, 2), (0.5, 0.3, 0.1, 0.1))) == [3, 1]
    assert ranked(((3, 1, 0, 2), (0.5, 0.25, 0.2, 0.05))) == [3], "0.25 is 1.25 x 0.2, and not above"
    assert ranked(((3, 1, 0, 2), (0.5, 0.25, 0.2, 0.05)), alpha=0.0) == [3, 1]
    assert ranked(((3, 1, 0, 2), (0.5, 0.3, 0.1, 0.1)), resident=(3,)) == [1]


def test_a_batch_wants_what_any_token_wants_by_its_best_score() -> None:
    tokens = ((3, 1, 0, 2), (0.5, 0.3, 0.1, 0.1)), ((1, 0, 2, 3), (0.6, 0.2, 0.15, 0.05))
    assert ranked(*tokens) == [1, 3, 0]


def test_without_cpu_assisted_scheduling_every_miss_is_loaded() -> None:
    context = BuildContext("toy", 4, 2, top_k=2)
    assert isinstance(compose("smoe", {"assigner": "load-all"}, context=context).assigner, LoadAll)


def test_other_forecasts_are_nothing_to_it() -> None:
    view = view_of_two(1)
    others = [Forecast(1, "gate", (0,), (1,)), Forecast(2, "partial", (0,), (1,))]
    assert TopScorePrefetcher(0.25).rank(view, others, NO_PLAN) == []
    assert TopScorePrefetcher(0.25).protect(view, others) == frozenset()


def test_a_forecast_without_scores_is_refused_with_the_way_out() -> None:
    bare = Forecast(1, "partial", (3, 1), (1, 1), [(3, 1, 0, 2)])
    with pytest.raises(PolicyError, match=r"layer 0: expected the scores of forecast partial@1 for 1 tokens, got 0"):
        TopScorePrefetcher(0.25).rank(view_of_two(1), [bare], NO_PLAN)


def test_where_all_experts_are_selected_all_are_wanted() -> None:
    forecast = Forecast(1, "partial", (), (), [(1, 0)], [(0.75, 0.25)])
    view = scored_view([(0.5, 0.5)], 2)
    assert TopScorePrefetcher(0.25).rank(view, [forecast], NO_PLAN) == [ExpertId(1, 1), ExpertId(1, 0)]


CONTEXT = BuildContext("toy", 8, 3, top_k=2)


def test_alpha_0_keeps_the_routing_and_no_prefetch_needs_no_forecast() -> None:
    exact = compose("smoe", {"alpha": 0.0, "prefetch": False}, context=CONTEXT)
    assert isinstance(exact.router, TrueRouter)
    assert (exact.needs.changes_routing, exact.needs.forecasts, exact.prefetcher) == (False, (), None)
    assert system("smoe").needs.changes_routing


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_alpha_is_a_share(alpha: float) -> None:
    with pytest.raises(ChoiceError, match=f"'smoe': alpha: expected a number from 0 to 1, got {alpha}"):
        compose("smoe", {"alpha": alpha}, context=CONTEXT)


@pytest.mark.parametrize(("start", "kind"), [("random", RandomPlacement), ("popular", PopularityPlacement)])
def test_the_ladder_may_stand_on_popular_residents(start: str, kind: type) -> None:
    context = replace(CONTEXT, calibration=toy_calibration(3, 8, 2))
    policy = compose("smoe", {"start": start}, context=context)
    assert isinstance(policy.placement, kind)
    assert policy.needs.calibration == (start == "popular")


def test_experts_of_all_layers_may_share_one_cache() -> None:
    placement = compose("smoe", {"pool": True}, context=CONTEXT).placement
    assert isinstance(placement, Pooled)
    assert isinstance(placement.placement, RandomPlacement)
