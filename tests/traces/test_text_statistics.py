"""Single sequences of a trace, and how like all of them they are."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import assume, given

from traces.layout import DECODE
from traces.statistics import lru_hit_rates, one_sequence_statistics, popularity_skew, sequences
from traces.trace import Trace
from trilane.testing.strategies import toy_shape
from trilane.testing.strategies import traces as drawn_traces


def texts(*routing: list[list[int]]) -> Trace:
    """Top-1 of 4 experts; ``routing[text][layer]`` lists the experts of its tokens, all of decode."""
    ids = np.concatenate([np.array(text, np.int16).T for text in routing])[..., None]
    lengths = [len(text[0]) for text in routing]
    tensors = {
        "sequence": np.repeat(np.arange(len(routing), dtype=np.int32), lengths),
        "position": np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        "phase": np.full(len(ids), DECODE, np.uint8),
        "topk_ids": ids,
        "topk_weights": np.ones(ids.shape, np.float16),
    }
    return Trace.from_tensors(toy_shape(ids.shape[1], 4, 1), tensors, {})


def test_likeness_is_the_correlation_with_the_popularity_of_all() -> None:
    found = one_sequence_statistics(texts([[0, 0, 0, 1]], [[0, 2, 0, 2]]))["likeness"]
    pooled = [5, 1, 2, 0]
    each = [np.corrcoef(uses, pooled)[0, 1] for uses in ([3, 1, 0, 0], [2, 0, 2, 0])]
    assert found == pytest.approx(np.mean(each))


def test_an_even_layer_says_nothing_about_likeness() -> None:
    even, skewed = [0, 1, 2, 3], [0, 0, 0, 1]
    assert one_sequence_statistics(texts([even, skewed], [even, skewed]))["likeness"] == pytest.approx(1)
    assert one_sequence_statistics(texts([even], [even]))["likeness"] is None


def test_one_sequence_is_not_compared_with_itself() -> None:
    assert one_sequence_statistics(texts([[0, 0, 1, 2]]))["likeness"] is None


@given(drawn_traces(max_layers=2))
def test_skews_and_chance_are_means_over_sequences(trace: Trace) -> None:
    """Counted one by one: the share of its experts that a decode token has in common with another of its text."""
    found, parts = one_sequence_statistics(trace), list(sequences(trace))
    for name in ("gini", "top_10_percent_share", "entropy"):
        assert found[name] == pytest.approx(np.mean([popularity_skew(part)[name].mean() for part in parts]))
    answers = [part.topk_ids[part.phase == DECODE] for part in parts]
    shares = [
        np.mean([
            len({*one[layer].tolist()} & {*other[layer].tolist()}) / trace.shape.top_k
            for one, other in permutations(ids, 2) for layer in range(trace.shape.moe_layers)
        ])
        for ids in answers if len(ids) > 1
    ]
    assert (found["chance"] is None) == (not shares)
    assume(shares)
    assert found["chance"] == pytest.approx(np.mean(shares), rel=1e-5, abs=1e-6)


def test_sequences_come_by_first_appearance() -> None:
    parts = [part.topk_ids[:, 0, 0].tolist() for part in sequences(texts([[0, 1]], [[2]], [[3]]))]
    assert parts == [[0, 1], [2], [3]]


def test_lru_hits_what_was_used_since_by_fewer_others_than_it_holds() -> None:
    """0 1 0 2 1 in one layer: 0 is used again after one other, 1 after two."""
    ids = np.array([0, 1, 0, 2, 1], np.int16).reshape(1, 5, 1, 1)
    assert lru_hit_rates(ids, 4).tolist() == [0, 1 / 5, 2 / 5, 2 / 5]


def test_texts_begin_with_empty_caches_and_layers_have_their_own() -> None:
    ids = np.array([[0, 0], [0, 0]], np.int16).reshape(2, 1, 2, 1)
    assert lru_hit_rates(ids, 2).tolist() == [0, 0]
