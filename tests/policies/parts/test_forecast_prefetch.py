"""Prefetches that gain time: who is worth a copy, in times that can be added up."""

from __future__ import annotations

from collections.abc import Sequence

from policies.mechanism.views import ExpertCosts, ExpertId, Forecast, LayerView
from policies.parts.assigners import ResidentOrCpu
from policies.parts.prefetchers import ForecastPrefetcher, slowdown_ns
from tests.kit.views_for_tests import costs, view


def layer_of(
    table: ExpertCosts, resident: Sequence[Sequence[int]], on_cpu: bool = False, backlog_ns: int = 0
) -> LayerView:
    """Layer 0 at work on one expert, on the GPU unless ``on_cpu``."""
    seen = view({0: 1}, table, ready={} if on_cpu else {0: 0}, resident=resident)
    return seen._replace(costs=(table,) * len(resident), h2d_backlog_ns=backlog_ns)


def ranked(seen: LayerView, *forecasts: Forecast) -> list[tuple[int, int]]:
    return [tuple(id) for id in ForecastPrefetcher().rank(seen, forecasts, ResidentOrCpu().assign(seen))]


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
    """At half speed a copy of 20 takes 10 ns from a CPU that is busy; the copy spares 9."""
    table = costs([1], [9], copy_ns=20)._replace(between_ns=30, cpu_permille=500)
    forecast = Forecast(1, "gate", (2,), (1,))
    assert slowdown_ns(table) == 10
    assert ranked(layer_of(table, [(), ()]), forecast) == [(1, 2)]
    assert ranked(layer_of(table, [(), ()], on_cpu=True), forecast) == []


def test_whoever_is_forecast_is_protected_there_or_not() -> None:
    seen = layer_of(costs([1], [1]), [(), (1,), ()])
    protected = ForecastPrefetcher().protect(seen, [NEXT, AFTER])
    assert protected == {ExpertId(1, e) for e in (1, 2, 3)} | {ExpertId(2, e) for e in (0, 3)}
