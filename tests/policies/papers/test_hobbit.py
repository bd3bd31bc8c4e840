"""HOBBIT: how many bits an expert needs, which copy is used, what is prefetched, and what is evicted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from policies.mechanism.views import ExpertId, Forecast, ResidencyView, Routing
from policies.papers.hobbit import (
    NARROW,
    SKIPPED,
    WIDE,
    AdaptivePrefetcher,
    Copies,
    FourScoresCache,
    MixedWidthRouter,
    Thresholds,
)
from policies.registry import ChoiceError, system
from tests.kit.views import NO_PLAN, scored_view

T = Thresholds(0.6, 0.9)
EXPERTS = 8
COPIES = Copies(EXPERTS)  # of expert e: e, and 8 + e
SCORES = ((0.5, 0.25, 0.2, 0.05, 0.0, 0.0, 0.0, 0.0),)


@pytest.mark.parametrize(("weights", "expected"), [
    ((1.0,), [WIDE]),
    ((0.5, 0.5), [WIDE, WIDE]),
    ((0.6, 0.4), [WIDE, WIDE]),  # up to T1
    ((0.7, 0.3), [WIDE, NARROW]),
    ((0.95, 0.05), [WIDE, SKIPPED]),
    ((0.5, 0.25, 0.2, 0.05), [WIDE, WIDE, NARROW, SKIPPED]),  # before them: 0, 0.5, 0.75, 0.95
    ((5.0, 2.5, 2.0, 0.5), [WIDE, WIDE, NARROW, SKIPPED]),  # shares of the token's weight
    ((0.0, 0.0), [WIDE, WIDE]),
])
def test_an_expert_matters_less_the_more_weight_is_before_it(weights: Sequence[float], expected: list[int]) -> None:
    assert list(T.of_token(weights)) == expected


def test_an_expert_needs_what_the_token_needs_that_asks_most_of_it() -> None:
    assert T.of_tokens([(0, 1), (2, 1)], [(0.95, 0.05), (0.7, 0.3)]) == {0: WIDE, 1: NARROW, 2: WIDE}


def routed(
    resident: Collection[int] = (), staged: Collection[int] = (), loading: Mapping[int, int] | None = None
) -> Routing:
    """One token with 0 and 1, which need the wide copy, 2, which needs the narrow one, and 3, which may be left out."""
    view = scored_view(SCORES, 4, resident=resident, staged=staged, loading=loading)
    return MixedWidthRouter(T, COPIES).route(view)


@pytest.mark.parametrize(("here", "used"), [
    ({}, (0, 1, 10)),
    ({"resident": (2,)}, (0, 1, 2)),  # the wide copy of 2 is there: wide enough
    ({"staged": (2,)}, (0, 1, 2)),
    ({"loading": {2: 5}}, (0, 1, 2)),
    ({"resident": (9, 8)}, (0, 1, 10)),  # the narrow copies of 0 and 1 are not wide enough
    ({"resident": (3,)}, (0, 1, 10, 3)),  # 3 costs nothing
    ({"resident": (11,)}, (0, 1, 10, 11)),
])
def test_misses_are_of_the_bits_that_they_need(here: Any, used: tuple[int, ...]) -> None:
    routing = routed(**here)
    assert tuple(routing.token_ids[0]) == used
    assert routing.active == tuple(sorted(used))
    assert tuple(routing.token_weights[0]) == SCORES[0][: len(used)]  # as they were


def test_a_routing_of_wide_copies_is_the_routers_own() -> None:
    view = scored_view(SCORES, 4, resident=(2, 3))
    assert MixedWidthRouter(T, COPIES).route(view) is view.routing


# --- prefetches -------------------------------------------------------------------------------------------------------


def forecast(layer: int, ids: tuple[int, ...], scores: tuple[float, ...] = SCORES[0][:4]) -> Forecast:
    """Of one token; the model has two experts a token, and the forecast names more."""
    return Forecast(layer, "gate", (), (), [ids], [scores] if scores else ())


def ranked(*forecasts: Forecast, resident: Sequence[Collection[int]], top_k: int = 3) -> list[tuple[int, int]]:
    view = scored_view(SCORES, 2)
    view = view._replace(residency=view.residency._replace(resident=resident))
    return [tuple(key) for key in AdaptivePrefetcher(T, COPIES, top_k).rank(view, forecasts, NO_PLAN)]


def test_the_next_layer_lacks_copies_in_the_bits_that_they_need() -> None:
    resident: list[Collection[int]] = [(), (6,), ()]
    assert ranked(forecast(1, (5, 6, 7, 4)), resident=resident) == [(1, 5), (1, 15)]
    assert ranked(forecast(1, (5, 6, 7, 4)), resident=resident, top_k=4) == [(1, 5), (1, 15)]  # 4 may be left out
    assert ranked(forecast(1, (5, 6, 7, 4), ()), resident=resident) == [(1, 5), (1, 15)]  # a third each: 0, 1/3, 2/3


def test_a_layer_that_lacks_nothing_gives_way_to_the_one_after_it() -> None:
    both = forecast(2, (0, 1, 2, 3)), forecast(1, (5, 6, 7, 4))
    assert ranked(*both, resident=[(), (5, 6, 15), ()]) == [(2, 0), (2, 1), (2, 10)]
    assert ranked(*both, resident=[(), (5, 6), ()]) == [(1, 15)]
    assert ranked(*both, resident=[(), (5, 6, 7), (0, 1, 2)]) == []


def test_what_forecasts_name_is_protected_with_the_copy_that_is_there() -> None:
    view = scored_view(SCORES, 2)
    view = view._replace(residency=view.residency._replace(resident=[(), (5, 7), ()]))
    named = AdaptivePrefetcher(T, COPIES, 3).protect(view, [forecast(1, (5, 6, 7, 4))])
    assert named == {ExpertId(1, 5), ExpertId(1, 6), ExpertId(1, 7)}


# --- the cache --------------------------------------------------------------------------------------------------------


def cache(**scores: float) -> FourScoresCache:
    """Of three layers."""
    router = MixedWidthRouter(T, COPIES)
    return FourScoresCache(3, router, **{"recent": 0.0, "frequent": 0.0, "precise": 0.0, "near": 0.0, **scores})


def seen(
    it: FourScoresCache, step: int, layer: int, ids: tuple[int, ...], weights: tuple[float, ...] = (0.5, 0.5),
    here: Collection[int] = (),
) -> None:
    """The router's choice of experts; the cache observes the copies that are used."""
    routing = Routing(tuple(sorted(ids)), (1,) * len(ids), [ids], [weights[: len(ids)]])
    residency = ResidencyView([here] * 3, [()] * 3)
    view = scored_view(SCORES, 2)._replace(step=step, layer=layer, routing=routing, ready_ns={}, residency=residency)
    it.observe(view._replace(routing=it.router.route(view)))


def filled(it: FourScoresCache, *members: tuple[int, int]) -> FourScoresCache:
    for key in members:
        it.admitted(ExpertId(*key), 0)
    return it


def gone(it: FourScoresCache, *blocked: tuple[int, int]) -> tuple[int, int] | None:
    return it.victim(ExpertId(0, 7), 0, {ExpertId(*key) for key in blocked})


def test_the_least_recent_goes() -> None:
    it = filled(cache(recent=1.0), (0, 1), (0, 2), (1, 3))
    for step, layer, ids in ((0, 0, (1, 2)), (1, 1, (3,)), (2, 0, (1,))):
        seen(it, step, layer, ids)
    assert [gone(it), gone(it, (0, 2)), gone(it, (0, 2), (1, 3))] == [(0, 2), (1, 3), (0, 1)]
    assert gone(it, (0, 1), (0, 2), (1, 3)) is None


def test_the_least_frequent_goes_and_uses_out_of_the_cache_count() -> None:
    it = cache(frequent=1.0)
    for step, ids in enumerate(((1, 2), (1, 3), (1, 2))):
        seen(it, step, 0, ids)
    filled(it, (0, 1), (0, 2), (0, 3))
    assert gone(it) == (0, 3)
    it.evicted(ExpertId(0, 3), 0)
    assert gone(it) == (0, 2)


def test_the_copy_whose_width_was_needed_least_goes() -> None:
    it = filled(cache(precise=1.0), (0, 1), (0, 2), (0, 11))
    seen(it, 0, 0, (1, 2), (0.7, 0.3), here=(2,))  # 2 is wide, a narrow copy would have done
    seen(it, 1, 0, (4, 3), (0.7, 0.3))  # a narrow copy has no precise use
    assert [gone(it), gone(it, (0, 2))] == [(0, 2), (0, 11)]


def test_what_is_needed_follows_from_all_experts_of_a_token_also_those_that_are_left_out() -> None:
    """Before expert 2 there is 0.6 of the weight, so its wide copy is needed; of the six that are used it is 0.65."""
    weights = (0.5, 0.1, 0.08, 0.08, 0.08, 0.07, 0.05, 0.04)
    assert list(T.of_token(weights)) == [WIDE, WIDE, WIDE, NARROW, NARROW, NARROW, SKIPPED, SKIPPED]
    assert list(T.of_token(weights[:6])) == [WIDE, WIDE, NARROW, NARROW, NARROW, SKIPPED]
    it = filled(cache(precise=1.0), (0, 2), (1, 7))
    seen(it, 0, 0, tuple(range(8)), weights)
    assert gone(it) == (1, 7)


def test_the_layer_whose_turn_comes_last_gives_way() -> None:
    it = filled(cache(near=1.0), (0, 1), (1, 1), (2, 1))
    seen(it, 0, 1, (5,))
    assert [gone(it), gone(it, (0, 1))] == [(0, 1), (2, 1)]  # after layer 1 come 2 and 0: 0 is two turns away


def test_scores_are_added() -> None:
    """At step 3 (the fourth): expert 1 of layer 0 was used at steps 0 to 2, expert 1 of layer 2 once, at step 3."""
    it = filled(cache(recent=0.5, frequent=0.5), (0, 1), (2, 1))
    for step in range(3):
        seen(it, step, 0, (1,))
    seen(it, 3, 2, (1,))
    # 0.5 x 3/4 + 0.5 x 3/4 = 0.75 and 0.5 x 4/4 + 0.5 x 1/4 = 0.625
    assert gone(it) == (2, 1)


def test_thresholds_are_in_order() -> None:
    with pytest.raises(ChoiceError, match=r"skip_above: expected at least narrow_above, 0\.95, got 0\.9"):
        system("hobbit").parse({"narrow_above": 0.95})
