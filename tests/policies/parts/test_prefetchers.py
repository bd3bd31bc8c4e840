"""Prefetches that gain time: who is worth a copy, in times that can be added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from policies.mechanism.views import ExpertCosts, ExpertId, Forecast, LayerInput, LayerView, Routing
from policies.parts.assigners import ResidentOrCpu
from policies.parts.caches import LruCache
from policies.parts.prefetchers import ForecastPrefetcher, TopPrefetcher, next_forecast
from tests.kit.views import NO_PLAN, Placed, costs, session, start, view


def layer_of(
    table: ExpertCosts, resident: Sequence[Sequence[int]], on_cpu: bool = False, backlog_ns: int = 0
) -> LayerView:
    """Layer 0 at work on one expert, on the GPU unless ``on_cpu``."""
    seen = view({0: 1}, table, ready={} if on_cpu else {0: 0}, resident=resident)
    return seen._replace(costs=(table,) * len(resident), h2d_backlog_ns=backlog_ns)


def ranked(seen: LayerView, *forecasts: Forecast, into: Literal["cache", "staging"] = "staging") -> list[ExpertId]:
    return list(ForecastPrefetcher(into).rank(seen, forecasts, ResidentOrCpu().assign(seen)))


NEXT = Forecast(1, "gate", (3, 1, 2), (2, 1, 1))
AFTER = Forecast(2, "gate", (0, 3), (1, 1))


def test_copies_until_one_comes_too_late_to_gain_anything() -> None:
    """A layer lasts 6 (GPU 2, between 4), a copy 5, the CPU 6 or 12: the first copy is in time, the second 4 late and
    spares 6, the third would be 9 late and spare nothing."""
    table = costs([2, 2], [6, 12], copy_ns=5)._replace(between_ns=4)
    assert ranked(layer_of(table, [(), (), ()]), NEXT) == [(1, 3), (1, 1)]
    assert ranked(layer_of(table, [(), (), ()], backlog_ns=3), NEXT) == [(1, 3)]


def test_residents_need_no_copy_and_the_next_layer_goes_first() -> None:
    table = costs([2, 2], [6, 12], copy_ns=5)._replace(between_ns=4)
    assert ranked(layer_of(table, [(), (3, 2), ()]), AFTER, NEXT) == [(1, 1), (2, 0), (2, 3)]


def test_a_copy_must_be_worth_more_than_it_slows_down_a_cpu_at_work() -> None:
    """The CPU is busy for 20 of 30 ns, in which the link does 10 of 20, and loses 10; a copy of 18 costs it 9."""
    table = costs([1], [20], copy_ns=18)._replace(between_ns=10, cpu_permille=500, copy_permille=500)
    cheap = table._replace(cpu_ns=(0, 9))  # the expert that is forecast
    forecast = Forecast(1, "gate", (2,), (1,))

    def with_next(next_layer: ExpertCosts, on_cpu: bool) -> LayerView:
        return layer_of(table, [(), ()], on_cpu=on_cpu)._replace(costs=(table, next_layer))

    assert ranked(with_next(cheap._replace(cpu_ns=(0, 10)), on_cpu=True), forecast) == [(1, 2)]
    assert ranked(with_next(cheap, on_cpu=False), forecast) == [(1, 2)]
    assert ranked(with_next(cheap, on_cpu=True), forecast) == []


def test_what_stays_in_the_cache_is_worth_half_a_later_use() -> None:
    """It is 12 late, saves nothing now, and takes 4 from a CPU that is busy for half of the time."""
    table = costs([1], [12], copy_ns=36)._replace(between_ns=12, cpu_permille=750)
    seen, forecast = layer_of(table, [(), ()], on_cpu=True), Forecast(1, "gate", (2,), (1,))
    assert ranked(seen, forecast) == []
    assert ranked(seen, forecast, into="cache") == [(1, 2)]


class Values:
    """A cache that knows what an expert is worth beyond its next victim, in tenths its number."""

    def advantages(self, layer: int, experts: Sequence[int], group: int) -> list[float | None]:
        return [None if expert == 0 else expert / 10 + group for expert in experts]


def test_a_cache_may_know_better() -> None:
    """A copy saves 12 x the advantage, and costs 4: unknown is half a use. Layers of a pool are one group."""
    table = costs([1], [12], copy_ns=36)._replace(between_ns=12, cpu_permille=750)
    seen, forecast = layer_of(table, [(), ()], on_cpu=True), Forecast(1, "gate", (3, 0, 4), (1, 1, 1))
    plan = ResidentOrCpu().assign(seen)
    assert ForecastPrefetcher("cache", Values(), pooled=True).rank(seen, [forecast], plan) == [(1, 0), (1, 4)]
    assert ForecastPrefetcher("cache", Values()).rank(seen, [forecast], plan) == [(1, 3), (1, 0), (1, 4)]
    assert ForecastPrefetcher("staging", Values()).rank(seen, [forecast], plan) == []


def test_how_busy_the_cpu_is_is_the_mean_of_a_phase() -> None:
    """A copy may outlast a layer that needs no CPU."""
    table = costs([1, 1], [9, 9], copy_ns=60)._replace(between_ns=1, cpu_permille=500, copy_permille=500)
    forecast, prefetcher, stays = Forecast(2, "gate", (2,), (1,)), ForecastPrefetcher("cache"), ResidentOrCpu()
    busy, idle = (layer_of(table, [(), (), ()], on_cpu=on_cpu) for on_cpu in (True, False))
    assert prefetcher.rank(idle, [forecast], stays.assign(idle)) == [(2, 2)]
    for _ in range(40):
        prefetcher.rank(busy, [forecast], stays.assign(busy))
    assert prefetcher.rank(idle, [forecast], stays.assign(idle)) == []
    prompt = idle._replace(phase="prefill")
    assert prefetcher.rank(prompt, [forecast], stays.assign(prompt)) == [(2, 2)]


def test_whoever_is_forecast_is_protected_there_or_not() -> None:
    seen = layer_of(costs([1], [1]), [(), (1,), ()])
    protected = ForecastPrefetcher().protect(seen, [NEXT, AFTER])
    assert protected == {ExpertId(1, e) for e in (1, 2, 3)} | {ExpertId(2, e) for e in (0, 3)}


# --- Prefetching the top of the next layer's forecast -----------------------------------------------------------------


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
