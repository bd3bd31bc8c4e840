"""SeqMoE: what its cache expects of whose forecasts, and which prefetches arrive in time, also for the next step."""

from __future__ import annotations

from typing import Any

from policies.mechanism.views import Assignment, ExpertId, Forecast
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

COST = costs([1], [1])


class TestForecastCacheLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return ForecastCache(2, 0.5, 4.0)


def forecast(layer: int, *experts: int, ahead: int = 0) -> Forecast:
    return Forecast(layer, "token", experts, (1,) * len(experts), steps_ahead=ahead)


def test_expected_uses_are_those_of_the_forecasts_and_what_was_used_before() -> None:
    cache = ForecastCache(2, 0.5, 1.0)  # 1 + 1/2 for the forecast turns, 1/2 for all that follow
    cache.observe(view({3: 1}, COST, layer=0, step=0))
    cache.expect(1, [forecast(0, 1, 2), forecast(0, 2, 3, ahead=1)])
    uses = [cache.expected_uses(ExpertId(0, expert)) for expert in range(4)]
    assert uses == [0, 1, 1.5, 0.5 + 0.5 * 0.5]
    cache.observe(view({1: 1}, COST, layer=0, step=1))  # the first turn is over, the second one has no forecast
    uses = [cache.expected_uses(ExpertId(0, expert)) for expert in range(4)]
    assert uses == [0, 0.5 * 0.5 + 0.5 * 0.5, 1, 1 + 0.5 * 0.25 + 0.5 * 0.25]


def test_without_any_forecast_uses_before_decide() -> None:
    cache = ForecastCache(2, 0.5, 1.0)
    cache.observe(view({3: 1}, COST, layer=0, step=0))
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
