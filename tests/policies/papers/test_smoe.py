"""SMoE: its router, the choice of alpha, and the whole policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import ExpertId, Forecast, LayerView, PolicyError, ResidencyView
from policies.papers.smoe import CacheRouter, TopScorePrefetcher, choose_alpha
from policies.parts.assigners import LoadAll
from policies.parts.placements import Pooled, PopularityPlacement, RandomPlacement
from policies.parts.routers import TrueRouter
from policies.registry import BuildContext, ChoiceError, compose, system
from tests.kit.views import NO_PLAN, scored_view
from trilane.testing.worlds import toy_calibration

ALPHA = 0.25
# k = 3: the 4th score is 0.15, so that top-score is above 0.1875 and a substitute above 0.1125.
ONE_LOW = (0.40, 0.20, 0.16, 0.15, 0.13, 0.05)  # 0 and 1 are top-score, 2 is low; 3 and 4 may replace it, 5 may not
TWO_LOW = (0.30, 0.17, 0.16, 0.15, 0.14, 0.08)  # 0 is top-score, 1 and 2 are low


def chosen(scores: Sequence[Sequence[float]], *, k: int = 3, listing: bool = False, **there: Any) -> list[list[int]]:
    routing = CacheRouter(ALPHA, listing).route(scored_view(scores, k, **there))
    return [list(ids) for ids in routing.token_ids]


@pytest.mark.parametrize(("resident", "expected", "why"), [
    ((0, 1, 2), [0, 1, 2], "nobody misses"),
    ((0, 1, 3, 4), [0, 1, 3], "2 misses: the best substitute"),
    ((0, 1, 4), [0, 1, 4], "3 is not there: the next best"),
    ((4,), [0, 1, 4], "0 and 1 miss too, and stay all the same"),
    ((0, 1, 5), [0, 1, 2], "5 scores too little"),
    ((), [0, 1, 2], "nobody to take"),
])
def test_a_low_score_expert_that_misses_gives_way(resident: tuple[int, ...], expected: list[int], why: str) -> None:
    assert chosen([ONE_LOW], resident=resident) == [expected], why


@pytest.mark.parametrize(("resident", "expected", "why"), [
    ((0, 3, 4), [0, 3, 4], "both exchanged, best substitute first"),
    ((0, 4), [0, 1, 4], "one substitute: the lower-scored of the two leaves, the higher is loaded or computed"),
    ((0, 2, 4), [0, 2, 4], "2 is there and stays, though 1 scores higher"),
    ((0, 2, 3, 4), [0, 2, 3], "only as many as miss"),
])
def test_as_many_leave_as_there_are_substitutes(resident: tuple[int, ...], expected: list[int], why: str) -> None:
    assert chosen([TWO_LOW], resident=resident) == [expected], why


def test_what_is_staged_counts_and_what_is_being_copied_stays() -> None:
    assert chosen([ONE_LOW], staged=(3,)) == [[0, 1, 3]]
    assert chosen([ONE_LOW], resident=(3,), loading={2: 7}) == [[0, 1, 2]]


def test_a_score_at_the_bound_is_low() -> None:
    at_the_bound = (0.5, 0.25, 0.125, 0.25 * 0.8)  # k = 2: 1.25 times the 3rd, 0.2, is 1's score
    assert chosen([at_the_bound], k=2, resident=(0, 3)) == [[0, 3]]
    above = (0.5, 0.2500001, 0.125, 0.2)
    assert chosen([above], k=2, resident=(0, 3)) == [[0, 1]]


# Of two experts, k = 1: the first token's 0 is low (0.55 <= 1.25 x 0.45), the second token's 1 is top-score (0.7).
CLOSE, SURE = (0.55, 0.45), (0.3, 0.7)


def test_top_score_experts_of_the_whole_batch_count_as_there() -> None:
    assert chosen([CLOSE, SURE], k=1) == [[1], [1]], "1 is computed anyway"
    assert chosen([CLOSE], k=1) == [[0]]
    sure_of_0 = (0.7, 0.3)
    assert chosen([CLOSE, sure_of_0], k=1, resident=(1,)) == [[0], [0]], "0 is computed anyway: no exchange"


def test_the_listing_sees_only_the_tokens_before() -> None:
    assert chosen([CLOSE, SURE], k=1, listing=True) == [[0], [1]]
    assert chosen([SURE, CLOSE], k=1, listing=True) == [[1], [1]]


def test_the_listing_exchanges_experts_that_are_there() -> None:
    everybody = range(6)
    assert chosen([TWO_LOW], resident=everybody) == [[0, 1, 2]]
    assert chosen([TWO_LOW], resident=everybody, listing=True) == [[0, 3, 4]]
    assert chosen([TWO_LOW], resident=(0, 1, 2, 4), listing=True) == [[0, 1, 4]]


def test_substitutes_weigh_their_own_score() -> None:
    view = scored_view([ONE_LOW], 3, resident=(3,), renormalised=False)
    routing = CacheRouter(ALPHA, norm_topk=False).route(view)
    assert routing.token_weights == [[0.40, 0.20, 0.15]]
    assert (routing.active, routing.tokens) == ((0, 1, 3), (1, 1, 1))


def test_which_sum_up_to_1_where_the_model_renormalises() -> None:
    routing = CacheRouter(ALPHA).route(scored_view([ONE_LOW], 3, resident=(3,)))
    assert routing.token_weights == [pytest.approx([0.40 / 0.75, 0.20 / 0.75, 0.15 / 0.75])]


def test_a_token_that_keeps_its_experts_keeps_its_weights() -> None:
    view = scored_view([ONE_LOW, TWO_LOW], 3, resident=(0, 1, 2))
    other = scored_view([TWO_LOW, ONE_LOW], 3, resident=(0, 1, 3))
    assert CacheRouter(ALPHA).route(view) is view.routing
    routing = CacheRouter(ALPHA).route(other)
    assert [list(ids) for ids in routing.token_ids] == [[0, 1, 3], [0, 1, 3]]
    assert (routing.active, routing.tokens) == ((0, 1, 3), (2, 2, 2))
    kept = CacheRouter(ALPHA).route(scored_view([ONE_LOW, (0.9, 0.05, 0.05, 0, 0, 0)], 3, resident=(3,)))
    assert kept.token_weights[1] == [0.9, 0.05, 0.05]


# --- drawn ------------------------------------------------------------------------------------------------------------

EXPERTS = 7
Scores = list[list[int]]  # whole numbers and quarters of alpha: every comparison is exact
a_batch = st.lists(st.lists(st.integers(1, 24), min_size=EXPERTS, max_size=EXPERTS), min_size=1, max_size=4)
on_gpu = st.sets(st.integers(0, EXPERTS - 1))
alphas = st.sampled_from((0.25, 0.5, 0.75, 1.0))


def reference(scores: Scores, k: int, alpha: float, resident: Collection[int]) -> list[set[int]]:
    """Section IV-B's text, one exchange after the other."""
    ranked = [sorted(range(EXPERTS), key=lambda e, own=own: (-own[e], e)) for own in scores]  # type: ignore[misc]
    bound = [own[rank[k]] if k < EXPERTS else 0 for own, rank in zip(scores, ranked, strict=True)]
    tops = [{e for e in rank[:k] if own[e] > b + alpha * b} for own, rank, b in zip(scores, ranked, bound, strict=True)]
    computed_anyway = set(resident).union(*tops)
    result = []
    for own, rank, b, top in zip(scores, ranked, bound, tops, strict=True):
        selected = set(rank[:k])
        while missing := [e for e in rank if e in selected and e not in top | computed_anyway and e in rank[:k]]:
            free = [e for e in rank[k:] if e in computed_anyway - selected and b - alpha * b < own[e]]
            if not free:
                break
            selected.remove(missing[-1])
            selected.add(free[0])
        result.append(selected)
    return result


@given(a_batch, st.integers(1, EXPERTS), alphas, on_gpu)
def test_the_router_agrees_with_the_text(scores: Scores, k: int, alpha: float, resident: set[int]) -> None:
    routing = CacheRouter(alpha).route(scored_view(scores, k, resident=resident))
    assert [set(ids) for ids in routing.token_ids] == reference(scores, k, alpha, resident)


@given(a_batch, st.integers(1, EXPERTS), alphas, on_gpu, st.booleans(), st.booleans())
def test_what_holds_of_every_routing(
    scores: Scores, k: int, alpha: float, resident: set[int], listing: bool, renormalised: bool
) -> None:
    view = scored_view(scores, k, resident=resident, renormalised=renormalised)
    routing = CacheRouter(alpha, listing, renormalised).route(view)
    assert routing is view.routing or [list(ids) for ids in routing.token_ids] != list(view.routing.token_ids)
    assert Counter(e for ids in routing.token_ids for e in ids) == routing.workload()
    assert list(routing.active) == sorted(routing.active)
    tokens = zip(scores, *view.routing[2:], *routing[2:], strict=True)
    for own, old, before, ids, weights in tokens:
        assert len(set(ids)) == k, "every token keeps k experts"
        bound = max((score for e, score in enumerate(own) if e not in old), default=0)
        assert {e for e in old if own[e] > (1 + alpha) * bound} <= set(ids), "top-score experts are never replaced"
        assert all(own[e] > (1 - alpha) * bound for e in ids if e not in old), "substitutes score nearly as much"
        assert sorted(weights, reverse=True) == list(weights), "descending"
        assert not renormalised or sum(weights) == pytest.approx(sum(before))


@given(a_batch, st.integers(1, EXPERTS), on_gpu)
def test_alpha_0_changes_nothing(scores: Scores, k: int, resident: set[int]) -> None:
    view = scored_view(scores, k, resident=resident)
    assert CacheRouter(0.0).route(view) is view.routing
    assert CacheRouter(0.0, listing=True).route(view) is view.routing


GRID = (0.0, 0.1, 0.2, 0.3, 0.4)
LINE = (100.0, 90.0, 80.0, 70.0, 60.0)  # 100 - 100 alpha


@pytest.mark.parametrize(("limit_ms", "alpha", "feasible"), [
    (200.0, 0.0, True), (100.0, 0.0, True), (75.0, 0.25, True), (60.01, 0.4, True), (59.0, 0.4, False),
])
def test_the_least_alpha_that_is_fast_enough(limit_ms: float, alpha: float, feasible: bool) -> None:
    choice = choose_alpha(GRID, LINE, limit_ms)
    assert choice.alpha == pytest.approx(alpha, abs=0.0005)
    assert choice.tpot_ms == pytest.approx(100 - 100 * alpha, abs=0.05)
    assert choice.feasible is feasible


def test_noise_is_fitted_over() -> None:
    noisy = (100.0, 94.0, 76.0, 74.0, 56.0)  # least squares: 80 - 108 (alpha - 0.2)
    assert choose_alpha(GRID, noisy, 90.8).alpha == pytest.approx(0.1, abs=0.0005)
    assert choose_alpha(GRID, noisy, 69.2).alpha == pytest.approx(0.3, abs=0.0005)


def test_a_curve_is_fitted_by_degree_2() -> None:
    curve = [100 - 200 * a + 250 * a * a for a in GRID]  # falls to 60 at 0.4
    assert choose_alpha(GRID, curve, 70.0, degree=2).alpha == pytest.approx(0.2, abs=0.0005)


@pytest.mark.parametrize(("alphas", "times", "degree"), [
    ((0.1,), (5.0,), 1), ((0.1, 0.2), (5.0, 4.0), 2), (GRID, LINE, 3), (GRID, (1.0,), 1),
])
def test_too_little_is_refused(alphas: Sequence[float], times: Sequence[float], degree: int) -> None:
    with pytest.raises(ValueError, match="choice of alpha: expected degree 1 or 2"):
        choose_alpha(alphas, times, 1.0, degree)


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
