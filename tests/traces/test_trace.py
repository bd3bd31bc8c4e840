"""A trace cut after some layers: what is left is as it was, and nothing points past the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.toys import toy_trace
from traces import layout
from traces.batches import BatchError, StepRows, best_ranks, compose, count_experts, step_workloads
from traces.layout import SCORE_SLACK, TraceError, no_probability
from traces.library import calibration_of, load_trace
from traces.models.catalogue import load_model
from traces.trace import Trace, first_layers, validate
from trilane.testing.worlds import toy_shape, traces


def test_the_first_layers_stay_and_forecasts_for_later_ones_go() -> None:
    whole, cut = load_trace("mini-moe"), load_trace("mini-moe:3")
    assert (cut.shape.moe_layers, cut.shape.name, len(cut)) == (3, "mini-moe:3", len(whole))
    assert np.array_equal(cut.topk_ids, whole.topk_ids[:, :3])
    assert whole.scores is not None
    assert cut.scores is not None
    assert np.array_equal(cut.scores, whole.scores[:, :3])
    for key, forecast in cut.forecasts.items():
        there = 3 - key.lookahead
        assert np.array_equal(forecast.ids[:, :there], whole.forecasts[key].ids[:, :there])
        assert (forecast.ids[:, there:] == -1).all()
        assert forecast.scores is None or not forecast.scores[:, there:].any()
    assert any(forecast.scores is not None for forecast in cut.forecasts.values())


def test_layers_that_attend_otherwise_are_cut_too() -> None:
    cut = load_trace("gpt-oss-20b:3").shape
    assert cut == replace(load_model("gpt-oss-20b:3"), expert_biases=None, sources=cut.sources)  # not in the file


def test_a_cut_trace_obeys_the_rules_of_the_format() -> None:
    cut = load_trace("mini-moe:3")
    validate("cut", cut.shape, cut.tensors())


@pytest.mark.parametrize("layers", [0, 9])
def test_layers_that_are_not_there_are_refused(layers: int) -> None:
    with pytest.raises(TraceError, match=f"mini-moe:{layers}: expected 1 to 8 layers"):
        first_layers(load_trace("mini-moe"), layers)


def test_its_calibration_is_cut_too_and_it_is_played_with_a_model_as_short() -> None:
    assert calibration_of("mini-deepseek:4") == "mini-deepseek-calibration:4"
    asked = Scenario(trace="mini-deepseek:4", model="deepseek-v2-lite:4", policy="daop", cached_share=0.3,
                     prompt_tokens=4, generated_tokens=3)
    spans = simulate(asked).spans
    assert spans.layer.max() == 3


def test_a_trace_without_its_forecasts_is_otherwise_the_same() -> None:
    whole, bare = load_trace("mini-deepseek:3"), load_trace("mini-deepseek:3:no-forecasts")
    assert whole.forecasts
    assert bare.forecasts == {}
    assert (bare.topk_ids == whole.topk_ids).all()
    assert (bare.shape, bare.checksum) == (whole.shape, f"{whole.checksum}:no-forecasts")
    assert calibration_of("mini-deepseek:3:no-forecasts") == calibration_of("mini-deepseek:3")


# --- which numbers are no probabilities -------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 1, 2, 5, 6])
def test_a_broken_row_is_named_whichever_block_it_is_in(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """Blocks of three tokens; the writer has written 40 before."""
    monkeypatch.setattr(layout, "BLOCK_TOKENS", 3)
    phase = np.zeros(7, np.uint8)
    phase[row] = 2
    layout.check_rows("t", toy_shape(1, 4, 1), {"phase": np.minimum(phase, 1)}, 40)
    with pytest.raises(TraceError, match=rf"t: phase row {40 + row}: expected 0 \(prefill\) or 1 \(decode\), got 2"):
        layout.check_rows("t", toy_shape(1, 4, 1), {"phase": phase}, 40)


def test_order_is_that_within_a_sequence() -> None:
    tensors = {"sequence": np.array([3, 1, 3, 1]), "position": np.array([5, 0, 4, 1]), "phase": np.array([0, 1, 0, 1])}
    layout.check_order("t", {**tensors, "position": np.array([4, 0, 5, 1])})
    message = r"t: position row 2: expected an increase within sequence 3, got 4 after 5 \(row 0\); put the rows"
    with pytest.raises(TraceError, match=message):
        layout.check_order("t", tensors)


def test_the_bits_of_a_score_tell_what_comparing_tells() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 4, 8)
    compared = ~((every >= 0) & (every <= 1 + SCORE_SLACK))
    assert no_probability(every).tolist() == compared.tolist()
    assert no_probability(every[:, ::2, 1:]).tolist() == compared[:, ::2, 1:].tolist()  # a view of a larger array


# --- Batches composed from captures of single sequences ---------------------------------------------------------------


def three_sequences() -> Trace:
    """Sequences 7, 5, 9 in this order; prompts of 2, 3, 1 tokens, then 2, 3, 2 decode tokens; 1 layer, top-1 of 4."""
    lengths = {7: (2, 2), 5: (3, 3), 9: (1, 2)}
    tokens = sum(map(sum, lengths.values()))
    tensors: dict[str, NDArray[Any]] = {
        "sequence": np.concatenate([[s] * (p + d) for s, (p, d) in lengths.items()]).astype(np.int32),
        "position": np.concatenate([np.arange(p + d) for p, d in lengths.values()]).astype(np.int32),
        "phase": np.concatenate([[0] * p + [1] * d for p, d in lengths.values()]).astype(np.uint8),
        "topk_ids": (np.arange(tokens) % 4).astype(np.int16).reshape(-1, 1, 1),
        "topk_weights": np.ones((tokens, 1, 1), np.float16),
    }
    return Trace.from_tensors(toy_shape(1, 4, 1), tensors, {})


def brief(steps: list[StepRows]) -> list[tuple[str, list[int], tuple[int, ...]]]:
    return [(step.phase, step.rows.tolist(), step.context) for step in steps]


def test_prompts_run_together_then_one_token_of_each() -> None:
    steps = compose(three_sequences(), batch=2)
    assert brief(steps) == [
        ("prefill", [0, 1, 4, 5, 6], (0, 0)),
        ("decode", [2, 7], (2, 3)),
        ("decode", [3, 8], (3, 4)),
    ]
    assert [step.index for step in steps] == [0, 1, 2]
    assert [step.sequences for step in steps] == [(7, 5)] * 3
    assert [step.tokens for step in steps] == [(2, 3), (1, 1), (1, 1)]


def test_sequences_come_in_the_order_asked_for() -> None:
    steps = compose(three_sequences(), batch=2, sequences=[9, 5, 7], generated_tokens=1)
    assert brief(steps) == [("prefill", [10, 4, 5, 6], (0, 0)), ("decode", [11, 7], (1, 3))]


def test_a_shorter_prompt_keeps_the_tokens_next_to_the_decode_tokens() -> None:
    steps = compose(three_sequences(), batch=2, prompt_tokens=1, generated_tokens=1)
    assert brief(steps) == [("prefill", [1, 6], (0, 0)), ("decode", [2, 7], (1, 1))]


def test_prefill_in_chunks_counts_the_context_of_each_sequence() -> None:
    steps = compose(three_sequences(), batch=2, generated_tokens=0, prefill_chunk_tokens=3)
    assert brief(steps) == [("prefill", [0, 1, 4], (0, 0)), ("prefill", [5, 6], (1,))]
    assert [step.sequences for step in steps] == [(7, 5), (5,)]


def test_a_run_without_prompt_decodes_only() -> None:
    assert brief(compose(three_sequences(), batch=1, prompt_tokens=0)) == [("decode", [2], (0,)), ("decode", [3], (1,))]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"batch": 4}, r"at least 4 sequences for batch 4, there are 3 \(7, 5, 9\)"),
    ({"batch": 2, "sequences": [5]}, r"at least 2 sequences for batch 2, there are 1 \(5\)"),
    ({"batch": 1, "sequences": [6]}, r"expected distinct sequences of the trace \(7, 5, 9\), got 6"),
    ({"batch": 2, "sequences": [5, 5]}, "expected distinct sequences"),
    ({"batch": 3, "prompt_tokens": 2}, r"expected 2 prompt tokens \(prompt_tokens\) in sequence 9, it has 1"),
    ({"batch": 2, "generated_tokens": 3}, r"expected 3 decode tokens \(generated_tokens\) in sequence 7, it has 2"),
    ({"batch": 0}, "expected batch >= 1, got 0"),
    ({"batch": 1, "prompt_tokens": -1}, "expected prompt_tokens >= 0, got -1"),
    ({"batch": 1, "prefill_chunk_tokens": 0}, "expected prefill_chunk_tokens >= 1, got 0"),
    ({"batch": 1, "prompt_tokens": 0, "generated_tokens": 0}, "found none to run"),
])
def test_a_batch_that_the_trace_cannot_fill_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        compose(three_sequences(), **arguments)  # type: ignore[arg-type]


def many(count: int) -> Trace:
    """As many sequences of one decode token."""
    tensors: dict[str, NDArray[Any]] = {
        "sequence": np.arange(count, dtype=np.int32), "position": np.zeros(count, np.int32),
        "phase": np.ones(count, np.uint8), "topk_ids": np.zeros((count, 1, 1), np.int16),
        "topk_weights": np.ones((count, 1, 1), np.float16),
    }
    return Trace.from_tensors(toy_shape(1, 4, 1), tensors, {})


@pytest.mark.parametrize(
    ("count", "brief"), [(8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, r"0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(9 in all\)")]
)
def test_messages_name_the_first_eight_sequences(count: int, brief: str) -> None:
    with pytest.raises(BatchError, match=rf"for batch 10, there are {count} \({brief}\); lower the batch"):
        compose(many(count), batch=10)
    with pytest.raises(BatchError, match=rf"expected distinct sequences of the trace \({brief}\), got 0, 99"):
        compose(many(count), batch=1, sequences=[0, 99])


def test_a_sequence_may_have_exactly_what_is_asked_for() -> None:
    trace = three_sequences()
    steps = compose(trace, batch=3, prompt_tokens=1, generated_tokens=2)
    assert brief(steps) == [
        ("prefill", [1, 6, 10], (0, 0, 0)), ("decode", [2, 7, 11], (1, 1, 1)), ("decode", [3, 8, 12], (2, 2, 2)),
    ]
    one = compose(trace, batch=3, prefill_chunk_tokens=1, generated_tokens=0)
    assert [(step.index, step.sequences, step.tokens, step.context) for step in one] == [
        (0, (7,), (1,), (0,)), (1, (7,), (1,), (1,)), (2, (5,), (1,), (0,)), (3, (5,), (1,), (1,)),
        (4, (5,), (1,), (2,)), (5, (9,), (1,), (0,)),
    ]


def test_choices_are_counted_and_ranked_without_those_that_are_missing() -> None:
    ids = np.array([[[2, 0, -1], [3, 1, 0]], [[0, 3, 2], [3, -1, -1]]], np.int16)
    assert count_experts(ids, 4).tolist() == [[2, 0, 2, 1], [1, 1, 0, 2]]
    assert best_ranks(ids, 4).tolist() == [[0, 3, 0, 1], [2, 1, 3, 0]]


def test_workloads_count_tokens_per_expert() -> None:
    trace = toy_trace([[[0, 1], [2, 3]], [[0, 2], [3, 1]], [[1, 0], [0, 3]]], experts=4)
    assert step_workloads(trace, np.array([0, 1])).tolist() == [[2, 1, 1, 0], [0, 1, 1, 2]]
    assert step_workloads(trace, np.array([2])).tolist() == [[1, 1, 0, 0], [1, 0, 0, 1]]
    assert step_workloads(trace, np.array([2])).dtype == np.int32


@given(traces(), st.data())
def test_every_row_is_taken_once_and_workloads_are_conserved(trace: Trace, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, len(np.unique(trace.sequence))))
    chunk = data.draw(st.none() | st.integers(1, 5))
    steps = compose(trace, batch=batch, prefill_chunk_tokens=chunk)
    rows = np.concatenate([step.rows for step in steps])
    chosen = np.unique(trace.sequence)[:batch]
    assert len(set(rows.tolist())) == len(rows)
    assert set(trace.sequence[rows].tolist()) == set(chosen.tolist())
    for step in steps:
        assert sum(step.tokens) == len(step.rows) <= (chunk or len(step.rows) if step.phase == "prefill" else batch)
        assert step.context == tuple(trace.position[step.rows[np.cumsum((0, *step.tokens[:-1]))]].tolist())
        workloads = step_workloads(trace, step.rows)
        assert (workloads.sum(axis=1) == len(step.rows) * trace.shape.top_k).all()
