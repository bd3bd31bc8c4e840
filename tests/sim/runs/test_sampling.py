"""Sampled steps and prompts: the right places, the right weights, and nothing lost but a remainder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import Forecast, Routing
from realrun.errors import RefusedError
from realrun.replay.replay import room_for
from sim.runs.bounds import StepBytes, null_model, step_bytes
from sim.runs.demand import StepDemand
from sim.runs.metrics import metrics_of
from sim.runs.prepare import prepare
from sim.runs.run import Run, bounds_of, labels_of, resolved
from sim.runs.sampling import answer_places, one_by_one, repeated, weights_of
from sim.runs.scenario import Scenario, ScenarioError
from sim.runs.vocabulary import LANES, Label
from sim.simulate import play, simulate
from traces.file import write_trace
from traces.layout import DECODE
from traces.library import load_trace
from traces.trace import Trace
from trilane.study.draws import draws_of

MINI: dict[str, Any] = {"trace": "mini-moe", "model": None, "cached_share": 0.25, "prompt_tokens": 8}
PREFILL = StepDemand(
    0, "prefill", 3, (3,), (Routing((1, 4), (2, 4)), Routing((0,), (6,))),
    ((Forecast(1, "gate", (0, 2), (5, 1)),), ()), None,
)


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "played", "places"), [
    (4, 4, [0, 1, 2, 3]), (10, 4, [0, 1, 5, 9]), (46, 6, [0, 1, 2, 17, 31, 45]), (5, 1, [4]), (1, 1, [0]),
])
def test_the_first_half_comes_one_by_one_and_the_other_is_spread_to_the_last_token(
    answer: int, played: int, places: list[int]
) -> None:
    assert answer_places(played, answer) == places
    prepared = prepare(Scenario(**MINI, generated_tokens=answer, sampled_steps=played))
    assert [step.context for step in prepared.steps] == [(0,), *((8 + place,) for place in places)]
    assert prepared.tokens_per_sequence == 8 + answer
    assert resolved(prepared).generated_tokens == answer


def test_an_answer_may_be_longer_than_the_trace() -> None:
    run = simulate(Scenario(**MINI, policy="fiddler", generated_tokens=1000, sampled_steps=10))
    assert (run.metrics.decode_steps, run.scenario.generated_tokens) == (10, 1000)
    assert run.metrics.tpot_ms > run.bounds["lower_bound_tpot_ms"] > 0


@pytest.mark.parametrize("sampled", [{"sampled_steps": 64}, {"sampled_steps": 5}, {"sampled_prompt_tokens": 8}])
def test_where_nothing_stands_for_others_a_run_is_that_of_all_steps(sampled: dict[str, int]) -> None:
    scenario = Scenario(**MINI, policy="mixtral-offloading", generated_tokens=5)
    whole, run = simulate(scenario), simulate(scenario.with_(**sampled))
    assert run.spans.equals(whole.spans)
    assert run.to_dict() == whole.to_dict()


@given(st.integers(1, 64), st.integers(1, 1000))
def test_the_weights_of_an_answer_are_its_steps(played: int, answer: int) -> None:
    played = min(played, answer)
    numbers = list(range(3, 3 + played))
    weights = weights_of(numbers, answer).of(np.array(numbers))
    assert weights.sum() == pytest.approx(answer)
    assert (weights[: one_by_one(played, answer)] == 1).all()


def test_the_other_half_stands_for_the_rest_of_the_answer() -> None:
    """Two of ten steps stand for themselves, and the two that follow for eight."""
    run = simulate(Scenario(**MINI, policy="mixtral-offloading", generated_tokens=4))
    early, late = (part_of(run, steps) for steps in ((1, 2), (3, 4)))
    whole = metrics_of(run.spans, 1, 10)
    assert whole.tpot_ms == pytest.approx((2 * early.tpot_ms + 8 * late.tpot_ms) / 10)
    for lane in LANES:
        busy_ms = [part.busy_share[lane] * part.tpot_ms for part in (early, late)]
        assert whole.busy_share[lane] * whole.tpot_ms == pytest.approx((2 * busy_ms[0] + 8 * busy_ms[1]) / 10)
    for lane in whole.stall_ms:
        assert whole.stall_ms[lane] == pytest.approx((2 * early.stall_ms[lane] + 8 * late.stall_ms[lane]) / 10)
    copied = run.spans[run.spans.kind == "demand"]
    demand = [copied[copied.step.isin(some)].bytes.sum() for some in ((1, 2), (3, 4))]
    assert whole.pcie_demand_bytes_per_token == pytest.approx((demand[0] + 4 * demand[1]) / 10)
    assert whole.busy_share["gpu"] + sum(whole.stall_share.values()) == pytest.approx(1)


def part_of(run: Run, steps: tuple[int, int]) -> Any:
    """Metrics of two of four decode steps, the others being taken for prefill."""
    spans = run.spans[run.spans.step <= steps[-1]].copy()
    spans["phase"] = ["decode" if step in steps else "prefill" for step in spans.step]
    return metrics_of(spans, 1)


@pytest.mark.parametrize("policy", ["mixtral-offloading@impl", "dali", "best-exact", "oracle"])
@pytest.mark.parametrize("answer", [24, 1000])
def test_no_policy_beats_the_bound_of_the_same_mean(policy: str, answer: int) -> None:
    scenario = Scenario(**{**MINI, "prompt_tokens": 32}, policy=policy, generated_tokens=answer, sampled_steps=24)
    run = simulate(scenario)
    assert run.bounds["lower_bound_tpot_ms"] <= run.metrics.tpot_ms


def test_changes_of_the_routing_count_as_often_as_their_steps() -> None:
    """Two of ten steps stand for themselves, and the two that follow for eight."""
    whole, two = (
        simulate(Scenario(**MINI, policy="daop", **tokens)).routing_errors
        for tokens in ({"generated_tokens": 10, "sampled_steps": 4}, {"generated_tokens": 2})
    )
    four = simulate(Scenario(**MINI, policy="daop", generated_tokens=4)).routing_errors
    assert whole is not None
    assert two is not None
    assert four is not None
    whole, two, four = (frame[frame.phase == "decode"].reset_index() for frame in (whole, two, four))
    assert (whole.tokens == 10).all()
    assert (whole.pairs == 5 * two.pairs).all()
    early, both = (frame.approximated_weight_share * frame.weight for frame in (two, four))
    weight = two.weight + 4 * (four.weight - two.weight)
    assert whole.weight.tolist() == pytest.approx(weight.tolist())
    assert whole.approximated_weight_share.tolist() == pytest.approx(((early + 4 * (both - early)) / weight).tolist())
    assert sum(both) > 0


def test_the_null_model_reads_the_bytes_of_the_mean_over_the_answer() -> None:
    prepared = prepare(Scenario(**MINI, batch=4, generated_tokens=10, sampled_steps=4))
    decode = [step for step in prepared.demand if step.phase == "decode"]
    early, late = (step_bytes(steps, prepared.shape) for steps in (decode[:2], decode[2:]))
    assert early.experts != late.experts
    assert early.cache < late.cache
    mean = StepBytes(*((2 * first + 8 * later) / 10 for first, later in zip(early, late, strict=True)))
    assert step_bytes(decode, prepared.shape, 10) == pytest.approx(mean)
    memory, hardware = prepared.memory.cache_bytes / prepared.shape.routed_bytes, prepared.hardware
    seconds = null_model(prepared.shape, hardware, mean, memory, prepared.needs.gpu_only)
    assert bounds_of(prepared)["null_model_tpot_ms"] == pytest.approx(seconds * 1e3)


def test_sampled_steps_of_whole_prompts_follow_the_prompts() -> None:
    """Prompts are as long as recorded if a scenario does not state their length."""
    whole = Scenario(**{**MINI, "prompt_tokens": None}, generated_tokens=8)
    steps, sampled = prepare(whole).steps, prepare(whole.with_(sampled_steps=4)).steps
    assert [step.context for step in sampled[:3]] == [step.context for step in steps[:3]]


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_repeated_prefill_has_the_same_experts_and_so_many_times_the_tokens() -> None:
    assert repeated(PREFILL, 4) == StepDemand(
        0, "prefill", 12, (12,), (Routing((1, 4), (8, 16)), Routing((0,), (24,))),
        ((Forecast(1, "gate", (0, 2), (20, 4)),), ()), None,
    )


def test_a_decode_step_and_a_prompt_that_is_not_repeated_stay_as_they_are() -> None:
    decode = PREFILL._replace(phase="decode")
    assert repeated(decode, 4) is decode
    assert repeated(PREFILL, 1) is PREFILL


@given(st.integers(1, 200_000), st.integers(1, 100), st.integers(1, 4))
def test_what_is_played_is_the_prompt_but_for_a_remainder(prompt: int, sampled: int, batch: int) -> None:
    scenario = Scenario(**{**MINI, "prompt_tokens": prompt}, batch=batch, generated_tokens=2)
    prepared = prepare(scenario.with_(sampled_prompt_tokens=sampled, hardware="a100-xeon6326"))
    prefill, *decode = prepared.steps
    assert 0 <= prompt - prefill.tokens[0] * prepared.prompt_repeats < prepared.prompt_repeats
    assert prefill.tokens[0] <= sampled
    assert [step.context for step in decode] == [(prompt,) * batch, (prompt + 1,) * batch]


def test_a_policy_that_reads_tokens_plays_the_short_prompt_and_has_no_ttft() -> None:
    long = Scenario(**{**MINI, "prompt_tokens": 500}, generated_tokens=4, sampled_prompt_tokens=8)
    whole, short = (simulate(long.with_(policy=policy)) for policy in ("on-demand", "daop"))
    assert whole.metrics.ttft_ms > 0
    assert Label.SHORT_PROMPT not in whole.labels
    assert short.metrics.ttft_ms is None
    assert "lower_bound_ttft_ms" in whole.bounds
    assert Label.SHORT_PROMPT in short.labels
    assert short.metrics.tpot_ms > 0


def test_a_prompt_that_was_not_played_at_its_length_has_no_bound_on_its_time() -> None:
    long = Scenario(policy="moe-infinity", prompt_tokens=500, generated_tokens=2, sampled_prompt_tokens=8)
    prepared = prepare(long)
    assert Label.SHORT_PROMPT in labels_of(prepared)
    assert list(bounds_of(prepared)) == ["lower_bound_tpot_ms", "null_model_tpot_ms"]


def test_a_trace_without_a_prompt_has_none_to_sample(tmp_path: Path) -> None:
    whole = load_trace("mini-moe")
    answers = {name: array[whole.phase == DECODE] for name, array in whole.tensors().items()}
    path = tmp_path / "answers.safetensors"
    write_trace(Trace.from_tensors(whole.shape, answers, {}), path)
    scenario = Scenario(trace=str(path), model=None, cached_share=0.25, generated_tokens=2, sampled_prompt_tokens=8)
    prepared = prepare(scenario)
    assert prepared.prompt_repeats == 1
    assert [step.phase for step in prepared.steps] == ["decode", "decode"]
    assert len(draws_of(scenario, 2)[1].sequences or ()) == 1


def test_the_bounds_of_a_short_prompt_are_not_those_of_the_long_one() -> None:
    """Whichever of two policies of one scenario is played first."""
    long = prepare(Scenario(policy="dali", prompt_tokens=64, sampled_prompt_tokens=8, generated_tokens=2))
    token_by_token = long.with_policy("smoe")
    assert bounds_of(long)["lower_bound_ttft_ms"] > 0
    assert bounds_of(token_by_token) == bounds_of(prepare(token_by_token.scenario))
    assert token_by_token.known_bounds is long.known_bounds
    assert len(long.known_bounds) == 2


def test_a_long_prompt_takes_the_kv_cache_and_the_time_of_all_its_tokens() -> None:
    short = Scenario(**MINI, policy="on-demand", generated_tokens=2)
    long = short.with_(prompt_tokens=8000, sampled_prompt_tokens=8)
    assert prepare(long).memory.kv_bytes == pytest.approx(prepare(short).memory.kv_bytes * 8002 / 10)
    assert simulate(long).metrics.ttft_ms > simulate(short).metrics.ttft_ms


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_chunks_of_a_repeated_prompt_are_refused() -> None:
    with pytest.raises(ScenarioError, match="prefill_chunk_tokens or sampled_prompt_tokens"):
        Scenario(prefill_chunk_tokens=4, sampled_prompt_tokens=4)


@pytest.mark.parametrize("sampled", [{"sampled_steps": 2}, {"sampled_prompt_tokens": 2}])
def test_a_real_machine_plays_every_step(sampled: dict[str, int]) -> None:
    prepared = prepare(Scenario(**MINI, generated_tokens=8, **sampled))
    assert play(prepared.with_policy("fiddler")).metrics.tpot_ms > 0
    with pytest.raises(RefusedError, match="sampled"):
        room_for([prepared])
