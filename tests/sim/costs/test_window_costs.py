"""Costs of an engine of windows in the timeline: the engine's numbers, and the closed form of its windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from sim.costs.cost_table import DraftWork
from sim.costs.engine import EngineError, load_fitted
from sim.costs.engine_costs import costs_on
from sim.costs.window_costs import MOST_ROWS, streamed_ns
from sim.machine.hardware import load_hardware
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import play
from traces.models.catalogue import load_model
from trilane.engines.strata.requests import WindowCounts
from trilane.engines.strata.window import WindowCosts, draft_ns, window_time
from trilane.testing.laws import law_1_conservation, law_2_causality, law_3_exclusivity

ENGINE, SHAPE = load_fitted("strata"), load_model("qwen3-30b-a3b@iq3_s")
MACHINE = load_hardware("rtx-4090+ddr5-5600+ryzen-9-7950x")
COSTS = costs_on(MACHINE, SHAPE, 64, "strata", threads=8)
CLOSED = WindowCosts(SHAPE, MACHINE, ENGINE, 8)
QUESTION = Scenario(
    "synthetic:qwen3-30b-a3b/1x8+40", "qwen3-30b-a3b@iq3_s", "rtx-4090+ddr5-5600+ryzen-9-7950x", engine="strata",
    threads=8, hardware_overrides={"contention.cpu_permille": 1000, "contention.copy_permille": 1000},
    policy="strata", parameters={"swaps": 0, "pcie_share": 0.0}, cached_share=0.4, prompt_tokens=8, generated_tokens=32,
    draft_tokens=3, draft_acceptance=(0.8, 0.65, 0.5), rejected_drafts="drawn",
)


def test_numbers_of_the_engine_reach_the_lanes() -> None:
    work, expert = ENGINE.window, COSTS.experts[0]
    assert work is not None
    assert COSTS.kernel_copies
    assert (COSTS.permille_before_barrier, COSTS.barrier_ns) == (700, 7000)
    assert (COSTS.sync_ns, COSTS.step_ns) == (work.handshake_ns.value, work.host_ns.value)
    assert (expert.first_gpu_ns, expert.first_cpu_ns) == (work.group_ns.value, work.pool_ns.value)
    assert expert.copy_ns == pytest.approx(CLOSED.fetch_ns, rel=1e-4)
    assert COSTS.draft.ns == round(draft_ns(CLOSED))


@pytest.mark.parametrize("experts", [1, 7])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_call_is_that_of_the_closed_form(experts: int, rows: int) -> None:
    own = COSTS.experts[0]
    call_ns = own.first_gpu_ns + experts * own.gpu_ns[rows]
    assert call_ns == pytest.approx(float(CLOSED.call_ns(experts, rows)), rel=1e-4)


def test_further_rows_take_time_as_far_as_a_window_has_any() -> None:
    attention = [COSTS.step(rows, (4096,)).attention_ns for rows in (1, 2, MOST_ROWS, MOST_ROWS + 1)]
    assert attention[1] - attention[0] == pytest.approx(CLOSED.row_ns, rel=0.1)
    assert attention[2] - attention[0] == pytest.approx((MOST_ROWS - 1) * CLOSED.row_ns, rel=0.1)
    assert attention[3] - attention[2] < CLOSED.row_ns / 4


STREAMED = {"window.kv_tokens": 20480}


def test_keys_and_values_from_the_host_lengthen_attention_as_in_the_closed_form() -> None:
    engine = ENGINE.with_numbers(STREAMED)
    costs = costs_on(MACHINE, SHAPE, 64, engine, threads=8)
    for rows, context in ((1, 4096), (4, 131072)):
        longer_ns = costs.step(rows, (context,)).attention_ns - COSTS.step(rows, (context,)).attention_ns
        assert longer_ns == pytest.approx(streamed_ns(SHAPE, MACHINE, engine.window, rows, context), abs=2)


def test_a_piece_of_a_prompt_copies_all_earlier_keys_and_values() -> None:
    """1,024 keys and values of 16 bits a token and layer."""
    costs = costs_on(MACHINE, SHAPE, 64, ENGINE.with_numbers(STREAMED), threads=8)
    longer_ns = costs.step(64, (10064,)).attention_ns - COSTS.step(64, (10064,)).attention_ns
    assert longer_ns == pytest.approx(10000 * 1024 * 2 / MACHINE.link.h2d_bytes_per_s * 1e9, rel=1e-4)
    assert costs.step(64, (64,)) == COSTS.step(64, (64,))


def test_the_gpu_has_room_for_experts_in_place_of_keys_and_values() -> None:
    question = QUESTION.with_(cached_share=None, gpu_memory_gb=8.0)
    whole, few = (
        prepare(question.with_(engine_overrides={"window.kv_tokens": tokens})).memory for tokens in (0, 10)
    )
    assert whole.kv_bytes - few.kv_bytes == 30 * SHAPE.moe_layers * 1024 * 2
    assert few.cache_bytes - whole.cache_bytes == whole.kv_bytes - few.kv_bytes


def test_the_handshake_and_the_pool_bear_what_crosses_in_mapped_memory() -> None:
    step = COSTS.step(4, (100,))
    assert (step.routing_ns, step.activations_ns, step.result_ns) == (0, 0, 0)


def test_more_threads_are_faster_and_taken_by_engines_in_common_use_alone() -> None:
    few, many = (costs_on(MACHINE, SHAPE, 4, "strata", threads).experts[0].cpu_ns[1] for threads in (1, 8))
    assert few > 2 * many
    assert costs_on(MACHINE, SHAPE, 4, "llama.cpp", 1) != costs_on(MACHINE, SHAPE, 4, "llama.cpp", 8)
    with pytest.raises(EngineError, match=r"threads: engine 'graphs' .* takes no number of threads: expected null"):
        costs_on(MACHINE, SHAPE, 4, "graphs", 8)


def test_a_scenario_takes_the_engines_draft_unless_it_states_its_own() -> None:
    prepared = prepare(QUESTION)
    assert prepared.costs.draft == DraftWork(1.0, 8, COSTS.draft.ns)
    assert prepare(QUESTION.with_(draft_ns=5)).costs.draft.ns == 5
    assert prepare(QUESTION.with_(draft_layers=0.0)).costs.draft.ns is None


def test_forecasts_from_a_partial_pass_have_no_place_in_a_stream_that_copies() -> None:
    """They would have to wait for the copies, and for the experts that these are for."""
    question = QUESTION.with_(policy="smoe", parameters={}, noisy_forecast_recall=(0.9,))
    with pytest.raises(ScenarioError, match=r"'smoe' needs forecasts from a partial forward pass, .* engine 'strata'"):
        _ = prepare(question).composition


def test_an_expert_on_its_way_runs_before_those_that_a_streamed_layer_only_passes_through() -> None:
    """Layer 24 waits for a copy ahead of one that it needs, behind which 18 others are queued."""
    question = Scenario(
        trace="mini-deepseek", model="deepseek-v2-lite", hardware="rtx3090-ddr4", engine="strata", prompt_tokens=8,
        generated_tokens=4, policy="moe-lightning@impl",
    )
    prepared = prepare(question)
    run = play(prepared)
    routings = {(s.index, i): routing.workload() for s in prepared.demand for i, routing in enumerate(s.routings)}
    law_1_conservation(run.spans, routings)
    law_2_causality(run.spans)
    law_3_exclusivity(run.spans)


# --- the closed form --------------------------------------------------------------------------------------------------


def counts_of(prepared: Prepared, run: Run) -> WindowCounts:
    """Mean entries of a layer of the decode steps, by where they were computed; distinct experts in their place."""
    decode = run.spans[(run.spans.phase == "decode") & (run.spans.kind == "expert")]
    steps: Sequence[int] = [step.drafted for step in prepared.demand if step.phase == "decode"]
    layers = len(steps) * prepared.shape.moe_layers
    fetched = run.spans[(run.spans.phase == "decode") & (run.spans.kind == "fetch")]
    on_gpu = (decode.lane == "gpu").sum() - len(fetched)
    shares = on_gpu / layers, (decode.lane == "cpu").sum() / layers, len(fetched) / layers
    return WindowCounts(1.0 + fmean(steps), fmean(steps), *shares)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_timeline_and_closed_form_agree_where_nothing_contends(share: float) -> None:
    """With the experts of the timeline, each computed for one row on the GPU: within 5 % of a window."""
    prepared = prepare(QUESTION).with_policy("strata", {"swaps": 0, "pcie_share": share})
    run = play(prepared)
    counts = counts_of(prepared, run)
    alike = replace(CLOSED, engine=ENGINE.with_numbers({"window.repeated": 0.0, "window.group_row_share": 0.0}))
    context = prepared.demand[-1].context[0]
    closed_ms = window_time(alike, counts, context).total_ns / 1e6
    tpot_ms, tokens = run.metrics.tpot_ms, run.metrics.tokens_per_step
    assert tpot_ms is not None
    assert tokens is not None
    assert tpot_ms * tokens == pytest.approx(closed_ms, rel=0.05)
