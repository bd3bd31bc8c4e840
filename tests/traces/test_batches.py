"""Batches composed from captures of single sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kit.toys import toy_trace
from traces.batches import BatchError, StepRows, best_ranks, compose, count_experts, step_workloads
from traces.trace import Trace
from trilane.testing.worlds import toy_shape, traces


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
