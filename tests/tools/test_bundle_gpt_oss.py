"""Choosing what is bundled of gpt-oss-20b's recorded tokens, on a few made-up ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tools.bundle_gpt_oss import GENERATED_TOKENS, PROMPT_TOKENS, RecordedTokens, choose, trace_of
from traces.layout import TraceError

LENGTH = PROMPT_TOKENS + GENERATED_TOKENS


def recorded(*facts: tuple[str, bool, int], again: tuple[int, int] | None = None, layers: int = 24) -> RecordedTokens:
    """Sequences by (data set, repetition, tokens); ``again``: the second is the first, in another data set."""
    lengths = [tokens for *_, tokens in facts]
    start = np.concatenate([[0], np.cumsum(lengths)])
    random = np.random.default_rng(0)
    ids = random.permuted(np.broadcast_to(np.arange(32, dtype=np.uint8), (start[-1], layers, 32)), axis=-1)[..., :4]
    if again:
        one, other = (slice(start[number], start[number] + LENGTH) for number in again)
        ids[other] = ids[one]
    weights = np.broadcast_to(np.array([0.4, 0.3, 0.2, 0.1], np.float16), ids.shape)
    keys = ("dataset", "repetition", "tokens")
    named: list[dict[str, Any]] = [dict(zip(keys, fact, strict=True)) for fact in facts]
    return RecordedTokens(ids, weights, start, named)


def test_data_sets_take_turns_and_loops_and_short_texts_are_left_out() -> None:
    facts = [("a", False, LENGTH)] * 3 + [("b", False, LENGTH + 7), ("b", True, LENGTH), ("b", False, LENGTH - 1)]
    evaluated, calibration = choose(recorded(*facts), 2)
    chosen = [number for pair in zip(evaluated, calibration, strict=True) for number in pair]
    assert sorted(chosen) == [0, 1, 2, 3]
    assert [facts[number][0] for number in chosen] == ["a", "b", "a", "a"]


def test_a_question_in_two_data_sets_is_taken_once() -> None:
    facts = [("a", False, LENGTH), ("b", False, LENGTH), ("c", False, LENGTH)]
    chosen = [number for part in choose(recorded(*facts, again=(0, 1)), 3) for number in part]
    assert len(chosen) == 2
    assert 2 in chosen


def test_a_trace_holds_the_tokens_of_its_sequences() -> None:
    given = recorded(("a", False, LENGTH), ("b", False, LENGTH))
    trace = trace_of(given, [1, 0])
    np.testing.assert_array_equal(trace.topk_ids[:LENGTH], given.ids[LENGTH:])
    assert trace.provenance["domains"] == ["b", "a"]
    assert trace.sequence[[0, -1]].tolist() == [0, 1]


def test_arrays_of_another_model_are_refused() -> None:
    with pytest.raises(TraceError, match="topk_ids must be"):
        trace_of(recorded(("a", False, LENGTH), layers=23), [0])
