"""Statistics of traces, computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.kit.toy_traces import toy_trace
from traces import statistics
from traces.layout import DECODE, ForecastKey
from traces.trace import Trace
from trilane.testing.strategies import traces


def one_layer(*experts: int, prompt_tokens: int = 0, of: int = 4) -> Trace:
    """A token for each of ``experts``, top-1 of one layer."""
    return toy_trace([[[expert]] for expert in experts], prompt_tokens=prompt_tokens, experts=of)


def joined(*parts: Trace) -> Trace:
    """The parts as sequences 0, 1, ... of one trace."""
    tensors: dict[str, Any] = {
        name: np.concatenate([part.tensors()[name] for part in parts]) for name in parts[0].tensors()
    }
    tensors["sequence"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts]).astype(np.int32)
    return Trace.from_tensors(parts[0].shape, tensors, {})


def test_popularity_is_the_share_of_tokens() -> None:
    trace = toy_trace([[[0, 1]], [[0, 2]], [[0, 3]], [[0, 1]]], prompt_tokens=2)
    assert statistics.popularity(trace).tolist() == [[1, 0.5, 0.25, 0.25]]
    assert statistics.popularity(trace, DECODE).tolist() == [[1, 0.5, 0, 0.5]]


def test_even_use_has_no_skew() -> None:
    skew = statistics.popularity_skew(one_layer(0, 1, 2, 3)).loc[0]
    assert skew.to_dict() == pytest.approx({"gini": 0, "top_10_percent_share": 0.25, "entropy": 1, "distinct_share": 1})


def test_one_expert_only_is_all_skew() -> None:
    skew = statistics.popularity_skew(one_layer(2, 2, 2)).query("layer == 0").iloc[0]
    expected = {"gini": 0.75, "top_10_percent_share": 1, "entropy": 0, "distinct_share": 0.25}
    assert skew.to_dict() == pytest.approx(expected)


def test_skew_of_shares_one_half_and_two_quarters() -> None:
    skew = statistics.popularity_skew(one_layer(0, 0, 1, 2)).loc[0]
    assert skew["entropy"] == pytest.approx(1.5 / 2)
    assert skew["gini"] == pytest.approx(3 / 8)


def test_reuse_distance_counts_decode_steps_within_a_sequence() -> None:
    trace = joined(one_layer(0, 0, 1, 0), one_layer(1, 0, 1, 1))
    distances = statistics.reuse_distance(trace).loc[0]
    assert distances["reuse_distance_p50"] == np.median([1, 2, 2, 1])
    assert distances["reuse_distance_p10"] == pytest.approx(1)
    assert np.isnan(statistics.reuse_distance(one_layer(0, 1, 2)).loc[0]).all()


def test_prompt_tokens_do_not_count_as_decode_steps() -> None:
    trace = one_layer(0, 0, 0, 1, 0, prompt_tokens=2)
    assert statistics.reuse_distance(trace).loc[0, "reuse_distance_p50"] == 2
    assert statistics.token_overlap(trace).loc[0, "adjacent_overlap"] == 0


def test_the_lag_profile_of_a_cycle_of_two() -> None:
    profile = statistics.lag_profile(one_layer(0, 1, 0, 1, 0, 1, of=2), range(1, 4))
    assert profile["probability"].tolist() == [0, 1, 0]
    assert profile["chance"].tolist() == [0.5, 0.5, 0.5]


def test_the_lag_profile_begins_with_the_next_token_and_ends_with_the_sixteenth() -> None:
    assert statistics.lag_profile(one_layer(*[0, 1] * 20, of=2))["lag"].tolist() == list(range(1, 17))


def test_the_lag_profile_does_not_cross_sequences() -> None:
    trace = joined(one_layer(0, 1), one_layer(1, 1))
    assert statistics.lag_profile(trace, range(1, 3))["probability"].tolist()[0] == 0.5
    assert np.isnan(statistics.lag_profile(trace, range(1, 3))["probability"].tolist()[1])


def test_adjacent_overlap_is_the_profile_at_lag_one() -> None:
    trace = toy_trace([[[0, 1]], [[1, 2]], [[2, 1]]])
    assert statistics.token_overlap(trace).loc[0, "adjacent_overlap"] == (0.5 + 1) / 2


def gain(trace: Trace, ahead: int = 1) -> float:
    used = statistics.experts_used(trace.topk_ids, trace.shape.experts)
    return statistics.likeness_gain(statistics.overlaps(used, used, trace.shape.top_k), ahead)


def test_a_layer_that_the_one_before_decides_is_gained_wholly() -> None:
    """Tokens 0 and 1 are alike in both layers, and so are 2 and 3; in the other trace layer 1 pairs them otherwise."""
    told = toy_trace([[[0], [2]], [[0], [2]], [[1], [3]], [[1], [3]]])
    untold = toy_trace([[[0], [2]], [[0], [3]], [[1], [2]], [[1], [3]]])
    assert gain(told) == 1
    # nobody that is alike now is alike later; of the others, one in three is
    assert gain(untold) == pytest.approx((0 - 1 / 3) / (1 - 1 / 3))
    assert np.isnan(gain(told, ahead=2))


def test_equally_near_tokens_count_in_equal_parts() -> None:
    trace = toy_trace([[[0], [0]], [[0], [0]], [[0], [1]]])
    # layer 0 does not tell the three apart, so nobody is guessed better than at random
    assert gain(trace) == 0


def test_prefill_and_decode_are_compared_as_daop_does() -> None:
    same = one_layer(0, 1, 0, 1, prompt_tokens=2)
    apart = one_layer(0, 0, 1, 1, prompt_tokens=2)
    tilted = one_layer(0, 0, 0, 1, prompt_tokens=2)
    assert statistics.prefill_decode_similarity(same) == pytest.approx(1)
    assert statistics.prefill_decode_similarity(apart) == 0
    assert statistics.prefill_decode_similarity(tilted) == pytest.approx(np.sqrt(0.5))
    assert statistics.prefill_decode_similarity(joined(same, apart, tilted)) == pytest.approx((1 + np.sqrt(0.5)) / 3)
    assert np.isnan(statistics.prefill_decode_similarity(one_layer(0, 1)))


def test_forecast_accuracy_counts_the_first_k_and_recall_all() -> None:
    plain = toy_trace([[[0, 1], [2, 3]], [[4, 5], [0, 1]]], experts=6)
    ids = np.full((2, 2, 4), -1, np.int16)
    ids[0, 0], ids[1, 0] = [2, 0, 3, 1], [0, 1, 2, 3]
    key = ForecastKey("gate", 1)
    trace = Trace.from_tensors(plain.shape, {**plain.tensors(), key.ids_name: ids}, {})
    assert statistics.forecast_statistics(trace).to_dict("records") == [
        {"forecast": "gate@1", "layer": 1, "accuracy_at_k": 0.75, "recall_at_m": 1.0}
    ]
    assert statistics.trace_statistics(trace)["forecasts"] == {"gate@1": {"accuracy_at_k": 0.75, "recall_at_m": 1.0}}


@given(traces())
def test_all_statistics_are_json_and_in_their_ranges(trace: Trace) -> None:
    found = statistics.trace_statistics(trace)
    json.dumps(found, allow_nan=False)
    means = found["layer_means"]
    for name in ("gini", "top_10_percent_share", "entropy", "distinct_share", "adjacent_overlap"):
        assert means[name] is None or -1e-6 <= means[name] <= 1 + 1e-6
    assert found["prefill_tokens"] + found["decode_tokens"] == found["tokens"] == len(trace)
    assert len(statistics.layer_statistics(trace)) == trace.shape.moe_layers
    np.testing.assert_allclose(statistics.popularity(trace).sum(axis=1), trace.shape.top_k)


@given(traces(min_decode=2))
def test_naming_the_experts_differently_changes_nothing(trace: Trace) -> None:
    renamed = replace(trace, topk_ids=(trace.shape.experts - 1 - trace.topk_ids).astype(np.int16), forecasts={})
    before, after = statistics.trace_statistics(trace), statistics.trace_statistics(renamed)
    for name, value in before["layer_means"].items():
        assert after["layer_means"][name] == (None if value is None else pytest.approx(value))
