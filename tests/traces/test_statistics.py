"""Statistics of traces, computed by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import permutations
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given

from tests.kit.toys import toy_trace
from traces import statistics
from traces.layout import DECODE, ForecastKey
from traces.statistics import lru_hit_rates, one_sequence_statistics, popularity_skew, sequences, trace_statistics
from traces.trace import Trace
from trilane.testing.worlds import toy_shape, traces


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


LAYERS, EXPERTS, TOP_K, PROMPTS, LENGTHS = 3, 11, 2, (3, 0, 4), (9, 5, 30)
NEXT, LATER = ForecastKey("gate", 1), ForecastKey("gate", 2)


def routed_sequences() -> list[list[list[list[int]]]]:
    """Experts of each sequence, token and layer; the lower ones more often, and often those of the token before."""
    random = np.random.default_rng(5)
    weights = np.arange(EXPERTS, 0, -1) / sum(range(EXPERTS + 1))
    found = []
    for length in LENGTHS:
        tokens = [[random.choice(EXPERTS, TOP_K, replace=False, p=weights).tolist() for _ in range(LAYERS)]]
        while len(tokens) < length:
            fresh = [random.choice(EXPERTS, TOP_K, replace=False, p=weights).tolist() for _ in range(LAYERS)]
            tokens.append([old if random.random() < 0.3 else new for old, new in zip(tokens[-1], fresh, strict=True)])
        found.append(tokens)
    return found


ROUTING = routed_sequences()


def forecasts(ahead: int) -> np.ndarray:
    """Four experts for each token and layer, by any rule; -1 where there is no layer to forecast."""
    ids = np.random.default_rng(ahead).permuted(np.tile(np.arange(EXPERTS), (sum(LENGTHS), LAYERS, 1)), axis=2)
    ids = ids[:, :, :4].astype(np.int16)
    ids[:, LAYERS - ahead :] = -1
    return ids


def trace() -> Trace:
    """The sequences one after the other, with two forecasts."""
    parts = [toy_trace(r, prompt_tokens=p, experts=EXPERTS) for r, p in zip(ROUTING, PROMPTS, strict=True)]
    whole = joined(*parts)
    ids = {NEXT.ids_name: forecasts(1), LATER.ids_name: forecasts(2)}
    return Trace.from_tensors(whole.shape, {**whole.tensors(), **ids}, {"synthetic": "by hand"})


def of_layer(layer: int) -> dict[str, float]:
    """Skew, distances of reuse and overlap."""
    used = Counter(expert for tokens in ROUTING for token in tokens for expert in token[layer])
    shares = sorted(used[expert] / (sum(LENGTHS) * TOP_K) for expert in range(EXPERTS))
    distances = [
        next(later - step for later in range(step + 1, len(decode)) if expert in decode[later][layer])
        for decode in decoded() for step, token in enumerate(decode) for expert in token[layer]
        if any(expert in later[layer] for later in decode[step + 1 :])
    ]
    return {
        "gini": sum(abs(a - b) for a in shares for b in shares) / (2 * EXPERTS),
        "top_10_percent_share": sum(shares[-2:]),
        "entropy": -sum(share * math.log(share) for share in shares if share) / math.log(EXPERTS),
        "distinct_share": len(used) / EXPERTS,
        **{f"reuse_distance_p{p}": float(np.percentile(distances, p)) for p in (10, 50, 90, 99)},
        "adjacent_overlap": repeated(layer, 1),
    }


def decoded() -> list[list[list[list[int]]]]:
    """The tokens of each sequence after its prompt."""
    return [tokens[prompt:] for tokens, prompt in zip(ROUTING, PROMPTS, strict=True)]


def repeated(layer: int, lag: int) -> float:
    """How many of a token's experts are used again ``lag`` tokens later."""
    pairs = [pair for decode in decoded() for pair in zip(decode, decode[lag:], strict=False)]
    return mean(len({*one[layer]} & {*other[layer]}) / TOP_K for one, other in pairs)


def chance() -> float:
    """That an expert is used by a token, if another of its layer uses it."""
    tokens = [token for decode in decoded() for token in decode]
    layers = []
    for layer in range(LAYERS):
        often = Counter(expert for token in tokens for expert in token[layer])
        layers.append(sum((count / len(tokens)) ** 2 for count in often.values()) / TOP_K)
    return mean(layers)


def similarity() -> float:
    """Of prompt and answer, in the sequences that have both."""
    found = []
    for tokens, prompt in zip(ROUTING, PROMPTS, strict=True):
        if prompt:
            cosines = []
            for layer in range(LAYERS):
                one, other = (
                    np.bincount([e for token in part for e in token[layer]], minlength=EXPERTS) / len(part)
                    for part in (tokens[:prompt], tokens[prompt:])
                )
                cosines.append(one @ other / math.sqrt((one @ one) * (other @ other)))
            found.append(mean(cosines))
    return mean(found)


def foreseen(ahead: int) -> dict[str, float]:
    """Forecasts of decode tokens: the first two of four, and all."""
    ids, place, shares = forecasts(ahead), 0, []
    for tokens, prompt in zip(ROUTING, PROMPTS, strict=True):
        for number, token in enumerate(tokens):
            if number >= prompt:
                for layer in range(ahead, LAYERS):
                    said, true = ids[place, layer - ahead].tolist(), {*token[layer]}
                    shares.append((len(true & {*said[:TOP_K]}) / TOP_K, len(true & {*said}) / TOP_K))
            place += 1
    accuracy, recall = (mean(column) for column in zip(*shares, strict=True))
    return {"accuracy_at_k": accuracy, "recall_at_m": recall}


def test_every_statistic() -> None:
    layers = [of_layer(layer) for layer in range(LAYERS)]
    expected: dict[str, Any] = {
        "synthetic": "by hand", "tokens": 44, "prefill_tokens": 7, "decode_tokens": 37, "sequences": 3,
        "layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K,
    }
    found = trace_statistics(trace())
    assert list(found) == [*expected, "layer_means", "prefill_decode_similarity", "lag_profile", "forecasts"]
    assert {name: found[name] for name in expected} == expected
    means = {name: mean(layer[name] for layer in layers) for name in layers[0]}
    assert found["layer_means"] == pytest.approx(means)
    assert found["prefill_decode_similarity"] == pytest.approx(similarity())
    lags = [
        {"lag": lag, "probability": mean(repeated(layer, lag) for layer in range(LAYERS)), "chance": chance()}
        for lag in range(1, 17)
    ]
    assert found["lag_profile"] == [pytest.approx(lag) for lag in lags]
    assert found["forecasts"] == {f"gate@{ahead}": pytest.approx(foreseen(ahead)) for ahead in (1, 2)}


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


@given(traces(max_layers=2))
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
