"""Prefetching the top of the next layer's forecast: whom, in what order, who is protected, and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.mechanism.views import ExpertId, Forecast, LayerInput, Routing
from policies.parts.assigners import ResidentOrCpu
from policies.parts.caches import LruCache
from policies.parts.prefetchers import TopPrefetcher, next_forecast
from tests.kit.views import NO_PLAN, Placed, costs, session, start, view

COST = costs((10,), (30,), copy_ns=100)


def forecast(active: Sequence[int], tokens: Sequence[int], *token_ids: Sequence[int], kind: str = "gate") -> Forecast:
    return Forecast(1, kind, tuple(active), tuple(tokens), token_ids)


def test_the_next_forecast_is_that_of_the_next_layer_of_the_kind_if_one_is_named() -> None:
    here = view({0: 1}, COST, layer=1)
    later, gate, residual = (Forecast(*which, (1,), (1,)) for which in ((3, "gate"), (2, "gate"), (2, "residual")))
    assert next_forecast(here, (later, gate, residual), "residual") is residual
    assert next_forecast(here, (later, residual, gate)) is residual
    assert next_forecast(here, (later, residual), "gate") is None
    assert next_forecast(here, ()) is None


def test_prefetches_the_busiest_absent_experts_of_the_next_layer() -> None:
    layer = view({0: 1}, COST, layer=1, resident=[(), (), (5, 6), ()])
    forecasts = [
        Forecast(3, "residual", (1,), (9,)),
        Forecast(2, "gate", (2,), (9,)),
        Forecast(2, "residual", (6, 3, 5, 0, 7), (9, 8, 7, 6, 5)),
    ]
    residual = TopPrefetcher(2, "residual", "staging")
    assert residual.rank(layer, forecasts, NO_PLAN) == [ExpertId(2, 3), ExpertId(2, 0)]
    assert TopPrefetcher(2, "gate", "staging").rank(layer, forecasts, NO_PLAN) == [ExpertId(2, 2)]
    assert residual.rank(layer, (), NO_PLAN) == ()


def test_residents_may_count_among_those_with_most_workload() -> None:
    here = view({0: 1}, COST, resident=[(), (6, 5), ()])
    forecasts = [forecast((6, 3, 5, 0), (9, 8, 7, 6))]
    of_all = TopPrefetcher(2, "gate", "staging", among="all")
    assert of_all.rank(here, forecasts, NO_PLAN) == [ExpertId(1, 3)]
    assert TopPrefetcher(2, "gate", "staging").rank(here, forecasts, NO_PLAN) == [ExpertId(1, 3), ExpertId(1, 0)]


def test_absent_experts_come_in_the_order_of_the_forecast() -> None:
    here = view({0: 1}, COST, resident=[(), (5,), ()])
    forecasts = [forecast((1,), (1,), kind="residual"), forecast((5, 4, 2), (1, 1, 1))]
    assert TopPrefetcher(4, "gate", "staging").rank(here, forecasts, NO_PLAN) == [ExpertId(1, 4), ExpertId(1, 2)]
    assert TopPrefetcher(4, "gate", "staging").rank(here, forecasts[:1], NO_PLAN) == ()


def test_whom_the_forecast_names_is_protected_where_prefetches_displace() -> None:
    here = view({0: 1}, COST, resident=[(), (5,), ()])
    forecasts = [forecast((1,), (1,), kind="residual"), forecast((2, 4, 5), (1, 1, 1))]
    into_cache = TopPrefetcher(1, "gate", "cache")
    assert into_cache.protect(here, forecasts) == {ExpertId(1, 2), ExpertId(1, 4), ExpertId(1, 5)}
    assert into_cache.protect(here, ()) == frozenset()
    assert TopPrefetcher(1, "gate", "staging").protect(here, forecasts) == frozenset()
    assert TopPrefetcher(1, "gate", "cache", guard=False).protect(here, forecasts) == frozenset()


@pytest.mark.parametrize(("guard", "victims"), [(True, [(1, 1)]), (False, [(1, 0)])])
def test_a_prefetch_displaces_nobody_who_is_forecast(guard: bool, victims: list[tuple[int, int]]) -> None:
    # Layer 1 holds 0 and 1, of which 0 is the least recent; the forecast names 0 and 2.
    cache, prefetcher = LruCache(), TopPrefetcher(2, "gate", "cache", guard=guard)
    it = session(Placed((), (0, 1)), assigner=ResidentOrCpu(), prefetcher=prefetcher, cache=cache, prefetch_slots=0)
    it.begin_step(0)
    it.plan_layer(LayerInput(0, 0, "decode", Routing((0,), (1,))))
    foresight, _ = it.foresee([forecast((0, 2), (1, 1))])
    assert foresight.prefetches == (ExpertId(1, 2),)
    assert list(start(it).victims) == victims
