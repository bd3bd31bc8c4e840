"""All statistics of a trace, counted a second time, expert by expert and token by token."""

from __future__ import annotations

import math
from collections import Counter
from statistics import mean
from typing import Any

import numpy as np
import pytest

from tests.kit.toy_traces import toy_trace
from tests.traces.test_statistics import joined
from traces.layout import ForecastKey
from traces.statistics import trace_statistics
from traces.trace import Trace

LAYERS, EXPERTS, TOP_K, PROMPTS, LENGTHS = 3, 11, 2, (3, 0, 4), (9, 5, 30)
NEXT, LATER = ForecastKey("gate", 1), ForecastKey("gate", 2)


def sequences() -> list[list[list[list[int]]]]:
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


ROUTING = sequences()


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
    assert list(found) == [
        *expected, "layer_means", "prefill_decode_similarity", "lag_profile", "forecasts"
    ]
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
