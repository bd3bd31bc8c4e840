"""Demand is worked out once for all plays of one trace that need the same of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from policies.protocols import Needs
from sim.machine.hardware import load_hardware
from sim.runs.calibration import calibrate, check_other_prompts, load_calibration
from sim.runs.demand import KnownDemand, MissingFromTraceError, demand_of, shared_demand
from sim.runs.memory import BudgetError, plan_memory
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import labels_of, resolved
from sim.runs.scenario import Scenario, ScenarioError
from traces import forecasts
from traces.file import write_trace
from traces.forecasts import NoisyForecasts
from traces.layout import ForecastKey
from traces.library import load_trace
from traces.models.shape import ModelShape
from traces.trace import Trace
from trilane.testing.worlds import toy_shape

GATE = Needs(forecasts=(("gate", 1),))
RECALL = {"noisy_forecast_recall": (0.5,)}


def setting() -> Prepared:
    return prepare(Scenario(prompt_tokens=4, generated_tokens=2))


def test_policies_with_the_same_needs_share_their_demand_on_every_machine() -> None:
    here = setting().with_policy("dali")
    there = here.on(load_hardware("rtx4090-ddr5", {}))
    assert here.demand == demand_of(here.trace, here.steps, here.needs)
    assert here.with_policy("dali", {"window": 2}).demand is here.demand
    assert there.demand is here.demand
    other = replace(GATE, gpu_only=True, max_batch=1)  # not what a demand depends on
    known = KnownDemand()
    first = shared_demand(known, here.trace, here.steps, GATE, None)
    assert shared_demand(known, here.trace, here.steps, other, None) is first


def test_whatever_changes_a_demand_asks_for_another() -> None:
    here, known = setting(), KnownDemand()
    others = (
        Needs(), Needs(scores=True), Needs(forecasts=(("oracle", 1),)), replace(GATE, forecast_phases=("decode",)),
        replace(GATE, forecast_layers={"gate": frozenset({3})}),
    )
    for needs in (GATE, *others):
        assert len(shared_demand(known, here.trace, here.steps, needs, None)) == 3
    shared_demand(known, here.trace, here.steps, GATE, NoisyForecasts((0.5,)))
    shared_demand(known, here.trace, here.steps[1:], GATE, None)
    shared_demand(known, replace(here.trace), here.steps, GATE, None)
    assert len(known) == 9


def test_only_the_layers_that_are_named_have_forecasts() -> None:
    here = setting()
    named = replace(GATE, forecast_layers={"gate": frozenset({3, 5})})
    for step in demand_of(here.trace, here.steps, named):
        assert [forecast.layer for forecasts in step.forecasts for forecast in forecasts] == [3, 5]


def test_scores_that_policies_share_are_read_only() -> None:
    here = setting()
    for step in demand_of(here.trace, here.steps, Needs(scores=True)):
        assert step.scores is not None
        assert not step.scores.flags.writeable


def test_what_each_token_has_is_not_kept() -> None:
    here, known = setting(), KnownDemand()
    tokens = shared_demand(known, here.trace, here.steps, Needs(tokens=True), None)
    assert (len(tokens[0].routings[0].token_ids), known) == (4, {})


@pytest.mark.parametrize("batch", [1, 3])
def test_forecasts_come_by_tokens_then_by_the_best_place_in_a_token_s_choice(batch: int) -> None:
    """Against a count token by token: which experts its k best are, and in which place."""
    here = prepare(Scenario(policy="dali", batch=batch, prompt_tokens=4, generated_tokens=2))
    top_k, ids = here.shape.top_k, here.trace.forecasts[ForecastKey("residual", 1)].ids
    for step, demand in zip(here.steps, here.demand, strict=True):
        for layer, of_layer in enumerate(demand.forecasts):
            for forecast in of_layer:
                chosen = [row[layer][:top_k].tolist() for row in ids[step.rows]]
                tokens = Counter(expert for row in chosen for expert in row)
                place = {e: min(row.index(e) for row in chosen if e in row) for e in tokens}
                ranked = sorted(tokens, key=lambda e: (-tokens[e], place[e], e))
                assert (forecast.active, forecast.tokens) == (tuple(ranked), tuple(tokens[e] for e in ranked))


def test_a_lone_token_s_forecast_is_in_its_gate_s_order() -> None:
    demand = prepare(Scenario(policy="dali", prompt_tokens=4, generated_tokens=2)).demand[-1]
    orders = [forecast.active for forecasts in demand.forecasts for forecast in forecasts]
    assert orders
    assert any(order != tuple(sorted(order)) for order in orders)


def test_of_a_trace_without_scores_the_weights_of_the_chosen_experts_are_read() -> None:
    here = prepare(Scenario(trace="gpt-oss-20b", model=None, policy="hybrimoe", prompt_tokens=4, generated_tokens=2))
    for step, rows in zip(here.demand, here.steps, strict=True):
        chosen = here.trace.topk_ids[rows.rows].astype(np.intp)
        assert step.scores is not None
        found = np.take_along_axis(step.scores, chosen, axis=2)
        np.testing.assert_array_equal(found, here.trace.topk_weights[rows.rows])
        assert np.count_nonzero(step.scores) == np.count_nonzero(found)
    assert labels_of(here) == (
        "noisy forecasts (recall 0.88, 0.82, 0.77)", "synthetic prompts", "scores of the chosen experts alone"
    )
    with pytest.raises(MissingFromTraceError, match="needs the scores of all experts, the trace has none"):
        here.with_policy("smoe").checked()


def test_forecasts_are_as_noisy_as_the_trace_says_or_the_scenario() -> None:
    scenario = Scenario(trace="gpt-oss-20b", model=None, policy="dali", prompt_tokens=4, generated_tokens=2)
    recalls = [resolved(prepare(one)).noisy_forecast_recall for one in (scenario, scenario.with_(**RECALL))]
    assert recalls == [(0.88, 0.82, 0.77), (0.5,)]
    assert resolved(prepare(Scenario(prompt_tokens=4, generated_tokens=2))).noisy_forecast_recall is None


def test_a_header_with_a_recall_that_is_none_is_refused() -> None:
    trace = load_trace("gpt-oss-20b")
    wrong = Trace.trusted(trace.shape, trace.tensors(), {"noisy_forecast_recall": "good"}, trace.checksum)
    with pytest.raises(ScenarioError, match="noisy_forecast_recall: expected"):
        prepare(Scenario(model=None), wrong)


# --- the division of GPU memory ---------------------------------------------------------------------------------------


SMALL = ModelShape(  # experts of 600 bytes; 4 x 600 a layer; non-expert weights 2 x (100 + 40) x 2 = 560 bytes
    "small", moe_layers=2, dense_layers=0, experts=4, top_k=2, hidden=10, expert_width=10, kv_width=5,
    attention_params=100,
)
KV = 2 * 5 * 2  # bytes a token
MIXTRAL = ModelShape(
    "mixtral", moe_layers=32, dense_layers=0, experts=8, top_k=2, hidden=4096, expert_width=14336, kv_width=2048,
    attention_params=41_943_040, vocab=32000,
)


def test_everything_adds_up() -> None:
    plan = plan_memory(SMALL, 5000, batch=2, tokens=10, demand_slots=1, prefetch_slots=1)
    assert (plan.non_expert_bytes, plan.kv_bytes, plan.staging_bytes) == (560, 20 * KV, 1200)
    assert plan.cache_bytes == 5000 - 560 - 400 - 1200
    assert plan.slots == 2840 // 600
    assert plan.fixed_bytes + plan.cache_bytes == plan.gpu_memory_bytes


def test_no_slot_is_legal() -> None:
    plan = plan_memory(SMALL, 560 + KV, batch=1, tokens=1, demand_slots=0)
    assert (plan.cache_bytes, plan.slots, plan.fixed_bytes) == (0, 0, plan.gpu_memory_bytes)


def test_one_byte_less_is_refused_with_the_missing_gb() -> None:
    with pytest.raises(BudgetError, match=r"0\.01 GB are missing; use a smaller batch"):
        plan_memory(SMALL, 560 + KV - 1, batch=1, tokens=1, demand_slots=0)


def test_the_message_says_what_takes_how_much() -> None:
    with pytest.raises(BudgetError) as caught:
        plan_memory(MIXTRAL, 4 * 10**9, batch=8, tokens=1000)
    assert "GPU memory of 4.00 GB is below what runs without any cached expert, 4.96 GB" in str(caught.value)
    assert "(non-expert weights 3.21, KV cache 1.05, staging slots 0.70, reserve 0.00): 0.96 GB" in str(caught.value)


def test_cache_never_exceeds_the_model() -> None:
    plan = plan_memory(SMALL, 10**6, batch=1, tokens=1)
    assert plan.cache_bytes == SMALL.routed_bytes
    assert plan.slots == 8
    assert plan.fixed_bytes + plan.cache_bytes < plan.gpu_memory_bytes


@pytest.mark.parametrize(("share", "slots"), [(0.0, 0), (0.25, 2), (0.3, 2), (0.5, 4), (1.0, 8)])
def test_a_share_is_a_share_of_all_experts(share: float, slots: int) -> None:
    plan = plan_memory(SMALL, 10**6, batch=1, tokens=1, cached_share=share)
    assert (plan.slots, plan.cache_bytes) == (slots, slots * 600)


def test_a_share_that_does_not_fit_is_refused() -> None:
    gpu = load_hardware("rtx3090-ddr4").gpu
    with pytest.raises(
        BudgetError, match=r"128 of 256 experts and takes 45.10 GB.*24.81 GB are missing.*fits is 0.222$"
    ):
        plan_memory(MIXTRAL, gpu.memory_bytes, reserve=gpu.reserve_bytes, batch=1, tokens=512, cached_share=0.5)


def test_the_largest_share_that_the_message_names_fits() -> None:
    gpu = load_hardware("rtx3090-ddr4").gpu
    for share in (0.222, None):
        plan = plan_memory(
            MIXTRAL, gpu.memory_bytes, reserve=gpu.reserve_bytes, batch=1, tokens=512, cached_share=share
        )
        assert plan.slots == 57


def test_the_machine_s_reserve_is_kept() -> None:
    gpu = load_hardware("rtx3090-ddr4").gpu
    ours = plan_memory(MIXTRAL, gpu.memory_bytes, batch=1, tokens=512)
    kept = plan_memory(MIXTRAL, gpu.memory_bytes, reserve=gpu.reserve_bytes, batch=1, tokens=512)
    assert ours.cache_bytes - kept.cache_bytes == gpu.reserve_bytes


def test_staging_holds_the_largest_expert_and_shares_are_of_bytes() -> None:
    mixed = replace(SMALL, expert_bytes=(600, 300))
    plan = plan_memory(mixed, 10**6, batch=1, tokens=1, demand_slots=2, cached_share=0.5)
    assert plan.staging_bytes == 1200
    assert plan.cache_bytes == mixed.routed_bytes // 2
    assert plan.slots == 4


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"tokens": 0}, {"demand_slots": -1}, {"prefetch_slots": -2}, {"cached_share": 1.5}]
)
def test_meaningless_requests_are_refused(wrong: dict[str, float]) -> None:
    arguments: dict[str, float] = {"batch": 1, "tokens": 1, **wrong}
    name = next(iter(wrong))
    with pytest.raises(BudgetError, match=name):
        plan_memory(SMALL, 10**6, **arguments)  # type: ignore[arg-type]


# --- Calibration ------------------------------------------------------------------------------------------------------


# Two sequences of one prompt and two decode tokens, captured side by side: token by token.
ROWS = [
    (7, 0, 0, (0, 1)), (4, 0, 0, (2, 3)), (7, 1, 1, (0, 2)), (4, 1, 1, (1, 3)), (7, 2, 1, (0, 3)), (4, 2, 1, (1, 2)),
]


def interleaved() -> Trace:
    sequence, position, phase, ids = zip(*ROWS, strict=True)
    tensors = {
        "sequence": np.array(sequence, np.int32), "position": np.array(position, np.int32),
        "phase": np.array(phase, np.uint8), "topk_ids": np.array(ids, np.int16)[:, None],
        "topk_weights": np.full((6, 1, 2), 0.5, np.float16),
    }
    return Trace.from_tensors(toy_shape(1, 4, 2), tensors, {"model": "toy"})


def test_decode_tokens_are_listed_sequence_after_sequence() -> None:
    found = calibrate(interleaved(), "toy")
    assert found.decode_ids[:, 0].tolist() in ([[0, 2], [0, 3], [1, 3], [1, 2]], [[1, 3], [1, 2], [0, 2], [0, 3]])


def test_activations_are_counted_by_sequence_in_order_of_appearance() -> None:
    found = calibrate(interleaved(), "toy")
    assert found.activations[:, 0].tolist() == [[3, 1, 1, 1], [0, 2, 2, 2]]
    assert found.decode_activations[:, 0].tolist() == [[2, 0, 1, 1], [0, 2, 1, 1]]
    assert found.popularity.tolist() == [[3 / 12, 3 / 12, 3 / 12, 3 / 12]]
    assert found.decode_popularity.tolist() == [[2 / 8, 2 / 8, 2 / 8, 2 / 8]]


def test_the_source_names_the_trace_and_its_checksum() -> None:
    trace = interleaved()
    assert calibrate(trace, "toy").source == f"toy ({trace.checksum})"


def test_a_file_that_was_captured_again_is_counted_again(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    write_trace(interleaved(), path)
    first = load_calibration(str(path))
    assert load_calibration(str(path)) is first
    trace = interleaved()
    other = Trace.from_tensors(trace.shape, {**trace.tensors(), "topk_ids": 3 - trace.topk_ids}, trace.provenance)
    write_trace(other, path)
    second = load_calibration(str(path))
    assert second.activations[:, 0].tolist() == [[1, 1, 1, 3], [2, 2, 2, 0]]
    assert second.source == f"{path} ({other.checksum})"


def test_recalls_are_the_statistics_of_each_forecast_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = interleaved()
    shape, calls = toy_shape(2, 4, 2), []
    tensors = {**trace.tensors(), "topk_ids": np.repeat(trace.topk_ids, 2, 1),
               "topk_weights": np.repeat(trace.topk_weights, 2, 1)}
    for kind, last in (("gate", (1, 2, 0, 3)), ("residual", (0, 3, 1, 2))):  # what the last token is guessed to use
        ids = np.full((6, 2, 4), -1, np.int16)
        ids[:, 0] = (0, 1, 2, 3)
        ids[5, 0] = last
        tensors[f"forecast/{kind}@1/ids"] = ids
    accuracies = forecasts.forecast_accuracies
    monkeypatch.setattr(forecasts, "forecast_accuracies", lambda t: calls.append(t) or accuracies(t))
    found = calibrate(Trace.from_tensors(shape, tensors, {"model": "toy"}), "toy").recalls
    # Decode tokens use 02, 13, 03 and 12: one expert of each of the first three is in 01, and the last is guessed.
    np.testing.assert_array_equal(found["gate", 1], [np.nan, (3 + 2) / 8])
    np.testing.assert_array_equal(found["residual", 1], [np.nan, 3 / 8])
    assert len(calls) == 1


# --- the prompts that are evaluated -----------------------------------------------------------------------------------

PROMPT = [(0, 1), (2, 3), (4, 5), (6, 7), (0, 3), (1, 2), (4, 7), (5, 6), (0, 2), (1, 3), (4, 6), (5, 7)]


def prompts(*each: list[tuple[int, int]]) -> Trace:
    """One layer; each sequence is a prompt and one decode token."""
    rows = [(n, at, 0, ids) for n, prompt in enumerate(each) for at, ids in enumerate(prompt)]
    rows += [(n, len(prompt), 1, (0, 7)) for n, prompt in enumerate(each)]
    sequence, position, phase, ids = zip(*rows, strict=True)
    tensors = {
        "sequence": np.array(sequence, np.int32), "position": np.array(position, np.int32),
        "phase": np.array(phase, np.uint8), "topk_ids": np.array(ids, np.int16)[:, None],
        "topk_weights": np.full((len(rows), 1, 2), 0.5, np.float16),
    }
    return Trace.from_tensors(toy_shape(1, 8, 2), tensors, {"model": "toy"})


def check(tmp_path: Path, evaluated: Trace, *calibrated_on: list[tuple[int, int]]) -> None:
    path = tmp_path / "calibration.safetensors"
    write_trace(prompts(*calibrated_on), path)
    check_other_prompts(Scenario(calibration=str(path)), evaluated)


OTHER = [(b, a) for a, b in PROMPT[::-1]]


@pytest.mark.parametrize("theirs", [
    PROMPT,
    [*PROMPT, *OTHER],  # its beginning
    [(b, a) for a, b in PROMPT],  # the same experts in another order
    [*PROMPT[:11], (5, 0)],  # 23 of 24 choices
])
def test_a_prompt_of_the_calibration_is_refused(tmp_path: Path, theirs: list[tuple[int, int]]) -> None:
    with pytest.raises(ScenarioError, match=r"calibration.safetensors' has the prompt of sequence 1: a policy would"):
        check(tmp_path, prompts(OTHER, PROMPT), [(0, 1)] * 4, theirs)


@pytest.mark.parametrize(("mine", "theirs"), [
    (PROMPT, OTHER),
    (PROMPT, PROMPT[:11]),  # shorter
    (PROMPT, [*PROMPT[:9], *OTHER[:3]]),  # 18 of 24 choices, and what the others share by chance
    (PROMPT[:3], PROMPT),  # too short to tell
])
def test_another_prompt_is_not(tmp_path: Path, mine: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> None:
    check(tmp_path, prompts(mine), theirs)


def test_without_a_calibration_there_is_nothing_to_check() -> None:
    check_other_prompts(Scenario(trace="generated"), prompts(PROMPT))


@pytest.mark.parametrize("name", ["mini-moe", "mini-deepseek"])
def test_bundled_traces_are_calibrated_on_other_prompts(name: str) -> None:
    check_other_prompts(Scenario(trace=name), load_trace(name))
