"""PreScope: the time of several layers in one cost, and what the link does for which of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import Assignment, ExpertId, Forecast
from policies.papers.prescope import (
    CrossLayerAssigner,
    CrossLayerPrefetcher,
    Horizon,
    LayerWork,
    best_copies,
    best_loads,
    later_ns,
)
from policies.papers.seqmoe import DeadlinePrefetcher, ForecastCache, _sequenced
from policies.protocols import Cache, Needs
from policies.testing.cache_laws import CacheLaws, CacheScenario
from sim.runs.demand import demand_of
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.views import costs, view
from tests.traces.test_forecasts import PLAIN
from traces.batches import compose
from traces.forecasts import NoisyForecasts

# An expert takes 2 ns on the GPU and 1 for kernels that those there share, 30 a token on the CPU, a copy 20; layers are
# 5 apart.
COST = costs([2, 2, 2], [30, 60, 90], copy_ns=20)._replace(between_ns=5, first_gpu_ns=1)


def work(here: Sequence[int], absent: Sequence[int], arrives_ns: int = 0) -> LayerWork:
    return LayerWork(COST, here, absent, arrives_ns)


@pytest.mark.parametrize(("loads", "link_ns", "copied", "ns"), [
    (0, 0, 0, 90),  # 60 + 30 on the CPU
    (1, 0, 0, 30),  # the expert of two tokens has run by 23, the other is computed until 30
    (2, 0, 0, 43),  # copies until 40, and the last one runs by itself
    (1, 50, 0, 73),
    (0, 0, 1, 30),
    (0, 0, 2, 7),  # three experts of 2 ns on the GPU, in kernels that they share
    (0, 40, 2, 43),  # the last of them is late
])
def test_a_layer_takes_as_long_as_its_slowest_side(loads: int, link_ns: int, copied: int, ns: int) -> None:
    assert work([1], [2, 1]).takes_ns(loads, link_ns, copied) == ns


def test_what_is_on_its_way_is_waited_for() -> None:
    assert work([1], [], arrives_ns=17).takes_ns(0, 0) == 17


def test_loaded_experts_have_kernels_of_their_own() -> None:
    slow = COST._replace(first_gpu_ns=100)
    assert LayerWork(slow, [1], [2, 1]).takes_ns(2, 0) == 3 * 2 + 3 * 100
    assert LayerWork(slow, [], [2, 1]).takes_ns(2, 0) == 2 * 2 + 2 * 100
    assert LayerWork(slow, [], [2, 1]).takes_ns(0, 0, copied=2) == 2 * 2 + 100


def test_what_is_on_its_way_to_a_later_layer_is_waited_for_there() -> None:
    coming = work([1], [], arrives_ns=40)
    assert later_ns([coming], copied=0, start_ns=10) == 30
    assert later_ns([coming], copied=0, start_ns=38) == 3  # at 40 it has been there for a while
    assert later_ns([work([], [1]), coming], copied=0) == 23 + 12  # the second layer begins at 28


def test_copies_ahead_end_before_the_next_layer_is_routed() -> None:
    assert work([], [2, 1]).copies_ahead(90, loads=0, link_ns=0) == 4  # in 95
    assert work([], [2, 1]).copies_ahead(30, loads=1, link_ns=0) == 0  # the load takes 20 of 35
    assert work([], [2, 1]).copies_ahead(30, loads=2, link_ns=0) == 0


def test_later_layers_take_over_what_the_link_has_left() -> None:
    first, second = work([1], [1]), work([1], [3])
    assert later_ns([first], copied=0) == 23  # a load
    assert later_ns([first], copied=1) == 5
    assert later_ns([first, second], copied=0) == 23 + 23
    assert later_ns([first, second], copied=2) == 5 + 5
    assert later_ns([first, second], copied=2, link_ns=13) == 16 + 5  # the first one's copy is late


def test_a_layer_leaves_the_link_to_the_next_one_where_that_gains_more() -> None:
    """Alone it would load its expert of one token (23 ns for 30); but then nothing arrives for the next layer in time,
    whose three tokens take 23 ns in place of 5."""
    assert best_loads(work([1], [1]), [], 0) == 1
    assert best_loads(work([1], [1]), [work([1], [3])], 0) == 0


def test_copies_that_come_in_time_are_those_that_shorten_the_layers_to_come() -> None:
    now = work([], [3])  # on the CPU for 90: the link could carry four copies
    assert best_copies(now, [work([1], [2, 1]), work([1], [1])], 0, 0) == 3
    assert best_copies(now, [work([1], [])], 0, 0) == 0


WORKLOADS = st.lists(st.integers(1, 3), max_size=4).map(lambda some: sorted(some, reverse=True))
WORKS = st.builds(work, st.lists(st.integers(1, 3), max_size=3), WORKLOADS)


@given(WORKS, st.lists(WORKS, max_size=2), st.integers(0, 60))
def test_the_loads_are_the_best_of_all_numbers_of_loads(first: LayerWork, later: list[LayerWork], link_ns: int) -> None:
    """Tried one by one, without leaving out those that are plainly too late."""

    def total_ns(loads: int) -> int:
        takes_ns = first.takes_ns(loads, link_ns)
        return takes_ns + later_ns(later, first.copies_ahead(takes_ns, loads, link_ns), start_ns=takes_ns + 5)

    chosen = best_loads(first, later, link_ns)
    assert total_ns(chosen) == min(map(total_ns, range(len(first.absent) + 1)))


# --- the parts --------------------------------------------------------------------------------------------------------


def test_the_assigner_plans_with_the_forecasts_of_the_layer_before() -> None:
    horizon = Horizon(2)
    before = view({0: 1}, COST, layer=0, resident=((0,), (), (5,)))
    now = view({0: 1, 1: 1}, COST, ready={0: 0}, layer=1, resident=((), (0,), (5,)))
    now = now._replace(costs=(COST,) * 3)
    assert CrossLayerAssigner(horizon).assign(now) == Assignment((0, 1), (), (1,), 23)
    told = [Forecast(1, "gate", (0,), (1,)), Forecast(2, "gate", (4, 5), (3, 1))]
    horizon.learn(before._replace(costs=(COST,) * 3), told)
    assert CrossLayerAssigner(horizon).assign(now) == Assignment((0,), (1,), (), 30)


def test_the_prefetcher_copies_for_the_next_layer_first_and_protects_it() -> None:
    now = view({0: 3}, COST, layer=0, resident=((), (5,), ()))._replace(costs=(COST,) * 3)
    told = [Forecast(1, "gate", (6, 5), (2, 1)), Forecast(2, "gate", (7, 8), (2, 1))]
    prefetcher = CrossLayerPrefetcher(Horizon(2))
    assert prefetcher.rank(now, told, Assignment((), (0,), (), 90)) == [ExpertId(1, 6), ExpertId(2, 7), ExpertId(2, 8)]
    assert prefetcher.rank(now, told, Assignment((0,), (), (0,), 23)) == [ExpertId(1, 6)]
    assert prefetcher.protect(now, told) == {ExpertId(1, 5), ExpertId(1, 6)}


def test_a_copy_in_flight_is_not_planned_again() -> None:
    """Expert 6 arrives at 10. Until the next layer is routed at 35 the link can carry one copy and begin another;
    layer 1 needs none of them."""
    now = view({0: 1}, COST, layer=0, resident=((), (5,), ()))
    now = now._replace(costs=(COST,) * 3, flying=(ExpertId(1, 6),), h2d_backlog_ns=10)
    told = [Forecast(1, "gate", (6, 5), (2, 1)), Forecast(2, "gate", (7, 8), (2, 1))]
    ranked = CrossLayerPrefetcher(Horizon(2)).rank(now, told, Assignment((), (0,), (), 30))
    assert ranked == [ExpertId(2, 7), ExpertId(2, 8)]


def test_forecasts_of_another_step_are_not_those_of_this_one() -> None:
    horizon, now = Horizon(1), view({0: 1}, COST, layer=0, step=3)
    horizon.learn(now, [Forecast(1, "gate", (6,), (1,))])
    assert [forecast.layer for forecast in horizon.layers(now)] == [1]
    assert horizon.layers(view({0: 1}, COST, layer=0, step=4)) == []
    assert horizon.layers(view({0: 1}, COST, layer=1, step=3)) == []


def test_looking_ahead_pays_in_the_reference_question() -> None:
    short = Scenario(policy="prescope", engine="graphs", prompt_tokens=16, generated_tokens=16)
    tpot_ms = [simulate(short.with_(policy=policy)).metrics.tpot_ms for policy in ("prescope", "fiddler", "on-demand")]
    assert tpot_ms[0] == min(tpot_ms)


# --- SeqMoE -----------------------------------------------------------------------------------------------------------


UNIT = costs([1], [1])


class TestForecastCacheLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return ForecastCache(2, 0.5, 4.0)


def forecast(layer: int, *experts: int, ahead: int = 0) -> Forecast:
    return Forecast(layer, "token", experts, (1,) * len(experts), steps_ahead=ahead)


def test_expected_uses_are_those_of_the_forecasts_and_what_was_used_before() -> None:
    cache = ForecastCache(2, 0.5, 1.0)  # 1 + 1/2 for the forecast turns, 1/2 for all that follow
    cache.observe(view({3: 1}, UNIT, layer=0, step=0))
    cache.expect(1, [forecast(0, 1, 2), forecast(0, 2, 3, ahead=1)])
    uses = [cache.expected_uses(ExpertId(0, expert)) for expert in range(4)]
    assert uses == [0, 1, 1.5, 0.5 + 0.5 * 0.5]
    cache.observe(view({1: 1}, UNIT, layer=0, step=1))  # the first turn is over, the second one has no forecast
    uses = [cache.expected_uses(ExpertId(0, expert)) for expert in range(4)]
    assert uses == [0, 0.5 * 0.5 + 0.5 * 0.5, 1, 1 + 0.5 * 0.25 + 0.5 * 0.25]


def test_without_any_forecast_uses_before_decide() -> None:
    cache = ForecastCache(2, 0.5, 1.0)
    cache.observe(view({3: 1}, UNIT, layer=0, step=0))
    assert cache.expected_uses(ExpertId(0, 3)) == (1 + 0.5 + 0.5) * 0.5


def test_the_member_that_is_expected_least_leaves() -> None:
    cache = ForecastCache(2, 0.5, 1.0)
    for expert in range(3):
        cache.admitted(ExpertId(0, expert), 0)
    cache.expect(0, [forecast(0, 0), forecast(0, 1, ahead=1)])
    assert cache.least_expected() == -1  # nothing had to leave so far: there is room
    assert cache.victim(ExpertId(0, 9), 0, ()) == ExpertId(0, 2)
    assert cache.least_expected() == 0
    assert cache.victim(ExpertId(0, 9), 0, {ExpertId(0, 2)}) == ExpertId(0, 1)


def test_jobs_take_the_latest_place_that_is_free_and_the_least_valued_has_none() -> None:
    a, b, c, d = (ExpertId(0, expert) for expert in range(4))
    jobs = [(-100.0, 2, a), (-27.0, 2, b), (-25.0, 1, c), (-15.0, 3, d)]
    assert _sequenced(jobs) == [b, a, d]  # c is due at 1, which b has, due at 2 as a is


class TestPrefetches:
    """Of three layers, a layer that takes 20 ns and copies of 10."""

    COSTS = costs([1, 1], [1, 1], copy_ns=10)

    def ranked(self, layer: int, makespan: int = 20) -> list[ExpertId]:
        cache = ForecastCache(2, 0.5, 1.0)
        prefetcher = DeadlinePrefetcher(cache, 3)
        told = [forecast(1, 4), forecast(2, 5), forecast(0, 6, ahead=1), forecast(1, 7, ahead=1)]
        for earlier in range(layer + 1):
            now = view({0: 1}, self.COSTS, layer=earlier, step=0, resident=((), (), ()))
            cache.observe(now)
            ranked = prefetcher.rank(now, told if earlier == 0 else (), Assignment((0,), (), (), makespan))
        return list(ranked)

    def test_layers_to_come_then_those_of_the_next_step(self) -> None:
        assert self.ranked(0) == [ExpertId(1, 4), ExpertId(2, 5), ExpertId(0, 6)]
        assert self.ranked(1) == [ExpertId(2, 5), ExpertId(0, 6), ExpertId(1, 7)]

    def test_less_expected_experts_come_only_while_there_is_room(self) -> None:
        cache = ForecastCache(2, 0.5, 1.0)
        prefetcher = DeadlinePrefetcher(cache, 3)
        cache.admitted(ExpertId(1, 8), 0)
        now = view({0: 1}, self.COSTS, layer=0, step=0, resident=((), (8,), ()))
        told = [forecast(1, 8, 4), forecast(1, 8, ahead=1)]  # 8 is expected 1.5 times, 4 once
        plan = Assignment((0,), (), (), 20)
        assert prefetcher.rank(now, told, plan) == [ExpertId(1, 4)]
        assert cache.victim(ExpertId(0, 0), 0, {ExpertId(1, 8)}) is None  # the pool is full
        assert prefetcher.rank(now, told, plan) == []

    def test_what_would_come_too_late_is_left_out(self) -> None:
        assert self.ranked(0, makespan=8) == [ExpertId(2, 5), ExpertId(0, 6)]
        assert self.ranked(0, makespan=3) == []


def test_forecasts_of_later_steps_are_given_once_with_the_first_layer() -> None:
    prefill, *decode = demand_of(
        PLAIN, compose(PLAIN, batch=1), Needs(forecasts=(("token", 1), ("token", 2))), NoisyForecasts((1.0, 1.0))
    )
    given = [[[(f.steps_ahead, f.layer, set(f.active)) for f in some] for some in step.forecasts] for step in decode]
    assert [len(some) for some in prefill.forecasts] == [0, 0]
    assert given[0] == [[(0, 1, {3, 4}), (1, 0, {5, 0}), (1, 1, {1, 2})], []]
    assert given[1] == [[(0, 1, {1, 2})], []]  # no token follows


MINI: dict[str, Any] = {"trace": "mini-moe", "model": None, "cached_share": 0.3, "policy": "seqmoe",
                        "prompt_tokens": 8, "generated_tokens": 16}


def test_better_forecasts_give_more_hits_and_prefetches_more_than_eviction_alone() -> None:
    hits = {
        (recall, ahead): simulate(
            Scenario(**MINI, noisy_forecast_recall=(recall, recall), parameters={"prefetch": ahead})
        ).metrics.decode_resident_hit_rate
        for recall in (0.2, 1.0)
        for ahead in (False, True)
    }
    assert hits[1.0, True] > hits[1.0, False] > hits[0.2, False]
    assert hits[1.0, True] > hits[0.2, True]


def test_experts_come_over_the_end_of_a_step() -> None:
    """Copied while a later layer was at work, and run in the next step."""
    spans = simulate(Scenario(**MINI, noisy_forecast_recall=(1.0, 1.0))).spans
    ahead = spans[spans.kind == "prefetch"]
    plans = spans[spans.kind == "plan"].set_index(["step", "layer"]).start_ns
    over = [row for row in ahead.itertuples() if plans.get((row.step, row.layer), row.start_ns) < row.start_ns]
    assert over
    runs = spans[(spans.kind == "expert") & (spans.lane == "gpu")]
    used = runs.merge(ahead, on=["layer", "expert"], suffixes=("", "_copy"))
    assert ((used.step == used.step_copy + 1) & (used.start_ns >= used.end_ns_copy)).any()
