"""Statistics of a trace: how skewed, how repetitive and how predictable its routing is, as a whole and by sequence.

Decode statistics are those of batch 1: one step is one token of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.forecasts import ForecastAccuracy, forecast_accuracies
from traces.layout import DECODE, PREFILL
from traces.trace import Trace

LAGS = range(1, 17)

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
_SKEWS = ("gini", "top_10_percent_share", "entropy")


def trace_statistics(trace: Trace) -> dict[str, Any]:
    """All statistics as a JSON-ready dict, as means over layers; None where the trace has no tokens for one."""
    frame = layer_statistics(trace)
    forecasts = forecast_statistics(trace).groupby("forecast")[["accuracy_at_k", "recall_at_m"]].mean()
    return {
        "synthetic": trace.provenance.get("synthetic"),
        "tokens": len(trace),
        "prefill_tokens": int((trace.phase == PREFILL).sum()),
        "decode_tokens": int((trace.phase == DECODE).sum()),
        "sequences": len(np.unique(trace.sequence)),
        "layers": trace.shape.moe_layers,
        "experts": trace.shape.experts,
        "top_k": trace.shape.top_k,
        "layer_means": {str(name): _number(frame[name].mean()) for name in frame.columns},
        "prefill_decode_similarity": _number(prefill_decode_similarity(trace)),
        "lag_profile": [
            {"lag": lag, "probability": _number(probability), "chance": _number(chance)}
            for lag, probability, chance in lag_profile(trace).itertuples(index=False, name=None)
        ],
        "forecasts": {
            str(name): {str(column): _number(value) for column, value in row.items()}
            for name, row in forecasts.iterrows()
        },
    }


def layer_statistics(trace: Trace) -> pd.DataFrame:
    """One row per layer (index ``layer``); see the functions that compute the columns."""
    return pd.concat([popularity_skew(trace), reuse_distance(trace), token_overlap(trace)], axis=1)


def popularity(trace: Trace, phase: int | None = None) -> Floats:
    """Tokens routed to an expert / tokens [layers, experts], in one phase or both. A row sums to top_k.

    NaN where there are no tokens.
    """
    rows = np.arange(len(trace)) if phase is None else np.flatnonzero(trace.phase == phase)
    return _frequencies(trace, rows)


def popularity_skew(trace: Trace) -> pd.DataFrame:
    """Per layer, over all tokens: ``gini`` (0 even, 1 - 1/E one expert), ``top_10_percent_share`` of the routed tokens
    that go to the most popular tenth of the experts (rounded up), ``entropy`` (1 even, 0 one expert), and
    ``distinct_share``: experts used at least once / experts.
    """
    shares = np.sort(popularity(trace) / trace.shape.top_k, axis=1)
    experts = shares.shape[1]
    ranks = np.arange(1, experts + 1)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return _per_layer(
        gini=(2 * ranks - experts - 1) @ shares.T / experts,
        top_10_percent_share=shares[:, -int(np.ceil(experts / 10)) :].sum(axis=1),
        entropy=-(shares * logs).sum(axis=1) / np.log(experts) if experts > 1 else np.zeros(len(shares)),
        distinct_share=(shares > 0).mean(axis=1),
    )


def reuse_distance(trace: Trace) -> pd.DataFrame:
    """Per layer: decode steps from one use of an expert to its next in the same sequence (1: the very next step), as
    percentiles. First uses have no distance; NaN where nothing was used twice.
    """
    rows, sequence, step = _decode_rows(trace)
    percentiles = [10, 50, 90, 99]
    table = []
    for layer in range(trace.shape.moe_layers):
        experts = trace.topk_ids[rows, layer]
        owner, when = (np.broadcast_to(values[:, None], experts.shape).ravel() for values in (sequence, step))
        order = np.lexsort((when, experts.ravel(), owner))
        same = (np.diff(owner[order]) == 0) & (np.diff(experts.ravel()[order]) == 0)
        distances = np.diff(when[order])[same]
        table.append(np.percentile(distances, percentiles) if len(distances) else [np.nan] * len(percentiles))
    columns = np.asarray(table, np.float64).T
    return _per_layer(**{f"reuse_distance_p{p}": column for p, column in zip(percentiles, columns, strict=True)})


def token_overlap(trace: Trace) -> pd.DataFrame:
    """Per layer: share of a decode token's experts that the token before it in its sequence used too."""
    return _per_layer(adjacent_overlap=_overlaps(trace, range(1, 2))[0])


def lag_profile(trace: Trace, lags: range = LAGS) -> pd.DataFrame:
    """Probability that an expert used at decode step t is used at step t + lag in the same sequence, mean over layers.

    ``chance``: the same probability if steps were independent draws with the layer's popularity, sum(p^2) / sum(p).
    """
    frequency = popularity(trace, DECODE)
    chance = float(((frequency**2).sum(axis=1) / frequency.sum(axis=1)).mean())
    return pd.DataFrame({"lag": list(lags), "probability": _overlaps(trace, lags).mean(axis=1), "chance": chance})


def likeness_gain(likeness: NDArray[np.float32], ahead: int) -> float:
    """Gain of predicting a later layer from a layer, in one sequence: (accuracy - accuracy of a random token) /
    (1 - accuracy of a random token): 0 no better, 1 perfect; NaN without such layers.

    A token's experts ``ahead`` layers later are predicted to be those of the token that shares most experts with it in
    this layer (the mean of several such).

    ``likeness`` [layers, tokens, tokens]: shares of experts in common.
    """
    layers, tokens = likeness.shape[:2]
    if layers <= ahead or tokens < 2:
        return float("nan")
    others = ~np.eye(tokens, dtype=np.bool_)
    now, later = np.where(others, likeness[:-ahead], -1), np.where(others, likeness[ahead:], 0)
    nearest = now == now.max(axis=2, keepdims=True)
    right = ((later * nearest).sum(axis=2) / nearest.sum(axis=2)).mean(axis=1)
    any_other = later.sum(axis=(1, 2)) / others.sum()
    return float(((right - any_other) / (1 - any_other)).mean())


def experts_used(ids: NDArray[np.int16], experts: int) -> NDArray[np.float32]:
    """Mask [layers, tokens, experts]: 1 where a token of ``ids`` [tokens, layers, k] has the expert."""
    used = np.zeros((ids.shape[1], ids.shape[0], experts), np.float32)
    np.put_along_axis(used, np.moveaxis(ids, 1, 0).astype(np.intp), 1, axis=2)
    return used


def overlaps(one: NDArray[np.float32], other: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """Shares of experts in common [layers, tokens of one, tokens of the other], of as many layers as both have."""
    layers = min(len(one), len(other))
    return np.asarray(one[:layers] @ np.swapaxes(other[:layers], 1, 2) / np.float32(k))


def prefill_decode_similarity(trace: Trace) -> float:
    """DAOP Eq. 1: mean over layers of the cosine between a sequence's activation frequencies in prefill and in decode;
    mean over the sequences that have both. NaN if none has.
    """
    similarities = []
    for sequence in np.unique(trace.sequence):
        mine = trace.sequence == sequence
        prefill, decode = (np.flatnonzero(mine & (trace.phase == phase)) for phase in (PREFILL, DECODE))
        if len(prefill) and len(decode):
            similarities.append(cosines(_frequencies(trace, prefill), _frequencies(trace, decode)).mean())
    return float(np.mean(similarities)) if similarities else float("nan")


def forecast_statistics(trace: Trace) -> pd.DataFrame:
    """``forecast_accuracies`` as a frame."""
    return pd.DataFrame(list(forecast_accuracies(trace)), columns=list(ForecastAccuracy._fields))


def _overlaps(trace: Trace, lags: range) -> Floats:
    """Mean shares [lags, layers] of a decode token's experts that its sequence uses again ``lag`` steps later."""
    rows, sequence, _ = _decode_rows(trace)
    overlaps = np.full((len(lags), trace.shape.moe_layers), np.nan)
    for layer in range(trace.shape.moe_layers):
        used = np.zeros((len(rows), trace.shape.experts), np.bool_)
        np.put_along_axis(used, trace.topk_ids[rows, layer].astype(np.intp), True, axis=1)
        for number, lag in enumerate(lags):
            same = sequence[lag:] == sequence[:-lag]
            if same.any():
                again = (used[lag:] & used[:-lag]).sum(axis=1)[same]
                overlaps[number, layer] = again.mean() / trace.shape.top_k
    return overlaps


def _decode_rows(trace: Trace) -> tuple[NDArray[np.intp], NDArray[np.int32], NDArray[np.intp]]:
    """Rows of decode tokens sequence by sequence, their sequence, and their step within it."""
    rows = np.flatnonzero(trace.phase == DECODE)
    rows = rows[np.argsort(trace.sequence[rows], kind="stable")]
    sequence = trace.sequence[rows]
    _, first, counts = np.unique(sequence, return_index=True, return_counts=True)
    return rows, sequence, np.arange(len(rows)) - np.repeat(first, counts)


def _frequencies(trace: Trace, rows: NDArray[np.intp]) -> Floats:
    layers, experts = trace.shape.moe_layers, trace.shape.experts
    counts = [np.bincount(trace.topk_ids[rows, layer].ravel(), minlength=experts) for layer in range(layers)]
    return np.asarray(counts, np.float64) / (len(rows) or np.nan)


def cosines(left: Floats, right: Floats) -> Floats:
    """Cosines of the rows of ``left`` with those of ``right``."""
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray((left * right).sum(axis=1) / norms)


def _per_layer(**columns: Floats) -> pd.DataFrame:
    frame = pd.DataFrame(columns)
    frame.index.name = "layer"
    return frame


def _number(value: Any) -> float | None:
    """A float for JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None


def one_sequence_statistics(trace: Trace) -> dict[str, float | None]:
    """Means over layers, then over sequences; None where no sequence says anything.

    ``gini``, ``top_10_percent_share`` and ``entropy`` within a sequence; ``chance``: overlap of two decode tokens of a
    sequence, drawn at random; ``likeness``: correlation, over experts, of a sequence's popularity with that in all.
    """
    pooled = popularity(trace)
    parts = list(sequences(trace))
    measures = [{**_of_one(part), "likeness": _likeness(popularity(part), pooled)} for part in parts]
    means = pd.DataFrame(measures, columns=[*_SKEWS, "chance", "likeness"], dtype=float).mean()
    if len(parts) == 1:
        means["likeness"] = np.nan  # like itself
    return {str(name): None if pd.isna(value) else float(value) for name, value in means.items()}


def sequences(trace: Trace) -> Iterator[Trace]:
    """The routing of each sequence as a trace."""
    for sequence in dict.fromkeys(trace.sequence.tolist()):
        rows = trace.sequence == sequence
        yield replace(trace, sequence=trace.sequence[rows], phase=trace.phase[rows], topk_ids=trace.topk_ids[rows])


def _of_one(part: Trace) -> dict[str, float]:
    values = {name: float(popularity_skew(part)[name].mean()) for name in _SKEWS}
    tokens = int((part.phase == DECODE).sum())
    if tokens > 1:
        uses = popularity(part, DECODE) * tokens
        shared = (uses * (uses - 1)).sum(axis=1).mean()
        values["chance"] = shared / (tokens * (tokens - 1) * part.shape.top_k)
    return values


def _likeness(one: Floats, pooled: Floats) -> float:
    """Mean correlation of two popularities [layers, experts], without layers in which all experts are used alike."""
    centred = [values - values.mean(axis=1, keepdims=True) for values in (one, pooled)]
    with np.errstate(invalid="ignore"):
        correlations = cosines(*centred)
    return float(correlations[np.isfinite(correlations)].mean()) if np.isfinite(correlations).any() else float("nan")


def lru_hit_rates(ids: NDArray[np.int16], experts: int) -> Floats:
    """Decode hit rates [experts] of LRU caches of 1, 2, ... experts a layer, each text from an empty cache.

    ``ids`` [texts, tokens, layers, k]. An expert hits a cache that is larger than the number of others used since.
    """
    texts, tokens, layers, _ = ids.shape
    used = np.broadcast_to(-1.0 - np.arange(experts), (texts, layers, experts)).copy()  # when; below 0: not yet
    hits = np.zeros(experts)
    for token in range(tokens):
        now = ids[:, token].astype(np.intp)
        since = (-used).argsort(axis=-1, kind="stable").argsort(axis=-1)
        known = np.take_along_axis(used, now, axis=-1) >= 0
        hits += np.bincount(np.take_along_axis(since, now, axis=-1)[known], minlength=experts)
        np.put_along_axis(used, now, token + now / experts, axis=-1)
    return np.asarray(hits.cumsum() / ids.size)
