"""HybriMoE's impact-driven prefetching: by hand, against a plain search over all experts, and in a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.mechanism.views import Assignment, ExpertCosts, ExpertId, Forecast, LayerInput, LayerView, Routing
from policies.papers.hybrimoe.mrs import MrsCache
from policies.papers.hybrimoe.prefetch import ImpactPrefetcher
from policies.papers.hybrimoe.schedule import Schedule, SimulationAssigner
from policies.papers.hybrimoe.system import CacheScorePrefetcher
from policies.parts.assigners import ResidentOrCpu
from tests.kit.depth import examples
from tests.kit.views import NO_PLAN, Placed, costs, session, start, view
from tests.policies.papers.test_hybrimoe import UNITS, listing

SCHEDULE = Schedule()


def forecast(layer: int, workload: Mapping[int, int], kind: str = "gate") -> Forecast:
    active = sorted(workload, key=lambda e: (-workload[e], e))
    return Forecast(layer, kind, tuple(active), tuple(workload[e] for e in active))


def seen(workload: Mapping[int, int], *residents: Sequence[int], cost: ExpertCosts = UNITS, **fields: Any) -> LayerView:
    """Layer 0 with this workload; residents of the layers from 0 on."""
    layer = view(workload, cost, ready=dict.fromkeys(residents[0], 0), resident=residents)
    return layer._replace(costs=(cost,) * len(residents), **fields)


def rank(layer: LayerView, *forecasts: Forecast, **parameters: Any) -> list[tuple[int, int]]:
    prefetcher = ImpactPrefetcher(SCHEDULE, **parameters)
    plan = SimulationAssigner(SCHEDULE).assign(layer)
    return [tuple(id) for id in prefetcher.rank(layer, forecasts, plan)]  # type: ignore[misc]


# --- by hand: GPU 1, CPU as the load, copy 3 --------------------------------------------------------------------------

# Layer 0: its one expert runs on the CPU [0-3]; the link is free from 0 on.
# Layer 1: CPU 2 (load 2) [0-2], link 1 (load 5) [0-3], GPU 1 [3-4]: makespan 4. With 1 cached 2, with 2 cached 4.
# Layer 2: copies by 3 and 6, and the CPU [0-9]: makespan 9. With one cached 7 (copies alone), with two 4.
NOW = seen({0: 3}, (), (0, 3), (0, 1))
NEXT = forecast(1, {1: 5, 2: 2})
LATER = forecast(2, {4: 9, 5: 9, 6: 9})


def test_the_greatest_gain_first_and_each_pick_counts_for_the_next() -> None:
    # Layer 1 gains 2 by expert 1, layer 2 gains 2 by any: the nearer layer. Then nothing more would arrive before layer
    # 1 starts (at 3); layer 2 starts at 3 + 2, so that 2 of the 3 of the next copy are hidden. A third comes too late.
    assert rank(NOW, LATER, NEXT) == [(1, 1), (2, 4)]
    assert rank(NOW, LATER, NEXT, size=1) == [(1, 1)]


def test_a_farther_layer_that_gains_more_comes_first_unless_discounted() -> None:
    more = forecast(2, {4: 9, 5: 9})  # CPU [0-9] against copies by 3 and 6, done at 7: makespan 7, with one cached 4
    assert rank(NOW, more, NEXT, size=1) == [(2, 4)]
    assert rank(NOW, more, NEXT, size=1, discount=0.5) == [(1, 1)]  # 1.5 < 2


def test_only_the_hidden_part_of_a_copy_counts() -> None:
    # layer 0 loads its expert by 3 and is done at 4: 1 of 3 is hidden for layer 1, all for layer 2, which starts at 8
    busy = seen({0: 8}, (), (0, 3), (0, 1))
    assert rank(busy, NEXT, LATER, size=1) == [(2, 4)]
    assert rank(busy, NEXT) == [(1, 1)]
    assert rank(busy._replace(h2d_backlog_ns=1), NEXT) == [(1, 1)]  # the link is free at 4, the layer done at 5
    idle = seen({0: 1}, (0,), (0, 3))  # done at 1
    assert rank(idle._replace(h2d_backlog_ns=1), NEXT) == []


def test_what_passes_between_layers_hides_copies_too() -> None:
    # With 2 between, layer 1 starts at 3 + 2, and layer 2, once 1 is picked, at 5 + 2 + 2: copies by 3, 6 and 9 are all
    # hidden. Those for layer 2 gain 2, then 3.
    table = UNITS._replace(between_ns=2)
    assert rank(NOW._replace(costs=(table,) * 3), LATER, NEXT) == [(1, 1), (2, 4), (2, 5)]
    idle = seen({0: 1}, (0,), (0, 3), cost=table, h2d_backlog_ns=1)  # done at 1: of the copy by 4, all but 1 is hidden
    assert rank(idle, NEXT) == [(1, 1)]


def test_without_the_rule_of_arrival_every_gain_counts_in_full() -> None:
    late = NOW._replace(h2d_backlog_ns=99)
    assert rank(late, LATER, NEXT) == []
    assert rank(late, LATER, NEXT, arrival=False) == [(1, 1), (2, 4), (2, 5)]  # they gain 2, 2 and 3


def test_nobody_is_brought_where_nobody_may_leave() -> None:
    full = seen({0: 3}, (), (1,))  # its only resident is expected
    crowded = forecast(1, {1: 5, 2: 5, 3: 5})
    assert rank(full, crowded) == []
    assert rank(full, crowded, pooled=True) != []
    assert rank(seen({0: 3}, (), ()), crowded) == []


@pytest.mark.parametrize(("residents", "picks"), [((0, 1), [(1, 4), (1, 5)]), ((0,), [(1, 4)])])
def test_each_pick_takes_the_room_of_one_who_may_leave(
    residents: tuple[int, ...], picks: list[tuple[int, int]]
) -> None:
    # Layer 0 is on the CPU until 4. Layer 1 copies in 2: three loads take 7, with one cached 5, with two 3.
    layer = seen({0: 4}, (), residents)._replace(costs=(UNITS, UNITS._replace(copy_ns=2)))
    assert rank(layer, forecast(1, {4: 9, 5: 9, 6: 9})) == picks


def test_nobody_is_brought_who_does_not_help() -> None:
    assert rank(NOW, forecast(1, {0: 1, 3: 1})) == []  # both are there
    assert rank(seen({0: 3}, (), tuple(range(5, 9))), forecast(1, {0: 1, 5: 9, 6: 9})) == []  # the CPU has time for 0
    assert rank(NOW) == []


def test_expects_by_its_own_kind_of_forecast() -> None:
    other = forecast(1, {1: 5, 2: 2}, kind="residual")
    assert rank(NOW, other) == []
    assert rank(NOW, other, kind="residual") == [(1, 1)]
    prefetcher = ImpactPrefetcher(SCHEDULE)
    protected = prefetcher.protect(NOW, (other, LATER, NEXT))
    assert protected == {ExpertId(2, e) for e in (4, 5, 6)} | {ExpertId(1, e) for e in (1, 2)}
    assert all(type(id) is ExpertId for id in protected)


# --- a plain search ---------------------------------------------------------------------------------------------------


def plain(
    layer: LayerView, forecasts: Sequence[Forecast], size: int, discount: Fraction, plan: Assignment, rule: Any,
    arrival: bool,
) -> list[ExpertId]:
    """Section IV-C with nothing saved: every expert of every layer is tried before every pick, by the listing."""
    cached = [set(residents) for residents in layer.residency.resident]
    room = {f.layer: len(cached[f.layer] - set(f.active)) for f in forecasts}
    link = layer.h2d_backlog_ns + len(plan.loads) * layer.costs[0].copy_ns
    picks: list[ExpertId] = []

    def makespan(coming: Forecast, there: set[int]) -> int:
        workload = dict(zip(coming.active, coming.tokens, strict=True))
        cost = layer.costs[coming.layer]
        return listing(view(workload, cost, ready=dict.fromkeys(there & set(workload), 0)), rule, True).makespan_ns

    while len(picks) < size:
        values: list[tuple[Fraction, int, int]] = []
        start = plan.makespan_ns + layer.costs[0].between_ns
        for coming in sorted(forecasts, key=lambda f: f.layer):
            number, there = coming.layer, cached[coming.layer]
            copy = layer.costs[number].copy_ns
            hidden = max(0, min(copy, start - link)) if arrival else copy
            without = makespan(coming, there)
            for expert in set(coming.active) - there if room[number] else ():
                gain = without - makespan(coming, there | {expert})
                values.append((gain * Fraction(hidden, copy) * discount ** (number - 1), -number, -expert))
            start += without + layer.costs[number].between_ns
        if not values or max(values)[0] <= 0:
            break
        _, number, expert = max(values)
        picks.append(ExpertId(-number, -expert))
        cached[-number].add(-expert)
        room[-number] -= 1
        link += layer.costs[-number].copy_ns
    return picks


@st.composite
def looks_ahead(draw: st.DrawFn) -> tuple[LayerView, list[Forecast]]:
    """Layer 0 of four, with up to three forecasts; each layer has costs and residents of its own."""
    table = st.lists(st.integers(1, 30), min_size=4, max_size=4).map(sorted)
    by_layer = [
        costs(
            draw(table), draw(table), first_cpu_ns=draw(st.integers(0, 9)), copy_ns=draw(st.integers(1, 40))
        )._replace(between_ns=draw(st.integers(0, 20)))
        for _ in range(4)
    ]
    residents = [tuple(sorted(draw(st.sets(st.integers(0, 9), max_size=6)))) for _ in range(4)]
    workload = st.dictionaries(st.integers(0, 9), st.integers(1, 4), min_size=1, max_size=8)
    layer = seen(draw(workload), *residents, cost=by_layer[0])._replace(costs=tuple(by_layer))
    forecasts = [forecast(number, draw(workload)) for number in sorted(draw(st.sets(st.integers(1, 3))))]
    return layer._replace(h2d_backlog_ns=draw(st.integers(0, 20))), forecasts


@pytest.mark.parametrize("rule", ["finish", "device_free"])
@settings(max_examples=examples(75))
@given(drawn=looks_ahead(), size=st.integers(1, 6), halves=st.booleans(), arrival=st.booleans())
def test_picks_what_a_plain_search_picks(
    drawn: tuple[LayerView, list[Forecast]], size: int, halves: bool, arrival: bool, rule: Any
) -> None:
    layer, forecasts = drawn
    discount = Fraction(1, 2) if halves else Fraction(1)
    schedule = Schedule(rule)
    prefetcher = ImpactPrefetcher(schedule, size, float(discount), arrival=arrival)
    plan = SimulationAssigner(schedule).assign(layer)
    got = prefetcher.rank(layer, forecasts, plan)
    assert list(got) == plain(layer, forecasts, size, discount, plan, rule, arrival)


# --- in a session -----------------------------------------------------------------------------------------------------


def scored(step: int, layer: int, scores: Sequence[float]) -> LayerInput:
    return LayerInput(step, layer, "decode", Routing((0, 1), (2, 2)), scores=[scores])


def test_a_prefetched_expert_is_not_the_victim_of_the_next_one() -> None:
    # Layer 1 has the residents 0 and 1; S is 0.1 for 0, 0.2 for 1, and 0 for 2 and 3, which the forecast expects.
    # 2 displaces 0; then 2 has the least S, but is expected: 3 displaces 1.
    cache = MrsCache(2, 4, keep=4, alpha=0.5)
    prefetcher = ImpactPrefetcher(SCHEDULE)
    it = session(Placed((), (0, 1)), assigner=ResidentOrCpu(), prefetcher=prefetcher, cache=cache, prefetch_slots=0)
    it.begin_step(0)
    it.plan_layer(scored(0, 0, (0.0, 0.0, 0.0, 0.0)))
    it.end_layer()
    it.plan_layer(scored(0, 1, (0.2, 0.4, 0.0, 0.0)))
    it.end_layer()
    it.end_step()
    it.begin_step(1)
    it.plan_layer(scored(1, 0, (0.0, 0.0, 0.0, 0.0)))  # 100 ns on the CPU: time for two copies of 20
    foresight, _ = it.foresee([forecast(1, {2: 2, 3: 2})])
    assert foresight.prefetches == (ExpertId(1, 2), ExpertId(1, 3))
    victims = []
    for _ in range(2):
        copy = start(it)
        victims.append(copy.victims)
        it.copied(copy)
    assert victims == [(ExpertId(1, 0),), (ExpertId(1, 1),)]
    assert it.residency.resident[1] == {2, 3}


# --- the released code ------------------------------------------------------------------------------------------------


def test_the_released_code_prefetches_by_the_scores_of_the_cache() -> None:
    cache = MrsCache(2, 4, keep=2, alpha=0.5)
    cache.observe(view({0: 1}, UNITS, layer=1)._replace(scores=[(0.1, 0.2, 0.3, 0.4)]))
    prefetcher = CacheScorePrefetcher(cache, 3)
    assert prefetcher.rank(NOW, (), NO_PLAN) == [ExpertId(1, 3), ExpertId(1, 2), ExpertId(1, 0)]
    assert prefetcher.protect(NOW, ()) == frozenset()
