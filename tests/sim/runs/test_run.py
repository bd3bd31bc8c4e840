"""Bounds that a run is compared with, and its energy, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.machine.devices import Power
from sim.runs.bounds import lower_bound
from sim.runs.prepare import prepare
from sim.runs.run import bounds_of, joules_per_token
from sim.runs.scenario import Scenario
from sim.simulate import simulate

POWER = Power(gpu_idle_w=20, gpu_busy_w=320, cpu_idle_w=40, cpu_busy_w=140)


def test_busy_and_idle_watts_over_a_decode_step() -> None:
    run = simulate(Scenario(trace="mini-moe", model=None, generated_tokens=2, cached_share=0.5))
    metrics = replace(run.metrics, tpot_ms=10.0, busy_share={"gpu": 0.5, "cpu": 0.25})
    # gpu 20 + 0.5 x 300 = 170 W, cpu 40 + 0.25 x 100 = 65 W; 235 W x 10 ms = 2.35 J for a batch of 2
    assert joules_per_token(metrics, POWER, batch=2) == pytest.approx(2.35 / 2)
    platform = replace(POWER, platform_w=65)
    assert joules_per_token(metrics, platform, batch=2) == pytest.approx(3.0 / 2)  # 65 W more
    assert joules_per_token(metrics, None, batch=2) is None
    assert joules_per_token(replace(metrics, tpot_ms=None), POWER, batch=2) is None
    assert run.to_dict()["energy_j_per_token"] > 0


def test_bounds_are_named_as_columns_and_those_that_do_not_apply_left_out() -> None:
    prepared = prepare(Scenario(policy="fiddler", cached_share=0.25, prompt_tokens=4, generated_tokens=2))
    memory, both = prepared.memory, bounds_of(prepared)
    assert list(both) == ["lower_bound_ttft_ms", "lower_bound_tpot_ms", "null_model_tpot_ms"]
    found = lower_bound(prepared.demand, prepared.costs, memory.cache_bytes + memory.staging_bytes)
    assert (both["lower_bound_ttft_ms"], both["lower_bound_tpot_ms"]) == (found.ttft_ns / 1e6, found.tpot_ns / 1e6)
    assert list(bounds_of(prepared.over(prepared.demand[:1]))) == ["lower_bound_ttft_ms"]
    assert list(bounds_of(prepared.with_policy("smoe"))) == ["null_model_tpot_ms"]


def test_bounds_are_shared_by_all_that_they_depend_on_and_by_nothing_else() -> None:
    """However a variant is made."""
    prepared = prepare(Scenario(policy="fiddler", cached_share=0.25, prompt_tokens=4, generated_tokens=2))
    own = prepared.lower_bounds
    assert prepared.with_policy("dali").lower_bounds is own
    twice = prepared.costs.map_experts(lambda expert: expert._replace(cpu_ns=tuple(2 * ns for ns in expert.cpu_ns)))
    for variant in (
        replace(prepared, costs=twice), replace(prepared, trace=replace(prepared.trace)),
        replace(prepared, steps=prepared.steps[:2]), prepared.over(prepared.demand[:1]),
    ):
        assert variant.lower_bounds is not own
    assert prepared.lower_bounds is own
