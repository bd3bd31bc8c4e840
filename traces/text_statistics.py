"""Statistics of the single sequences of a trace: how skewed each is by itself, and how like all of them together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.layout import DECODE
from traces.statistics import Floats, cosines, popularity, popularity_skew
from traces.trace import Trace

_SKEWS = ("gini", "top_10_percent_share", "entropy")


def one_sequence_statistics(trace: Trace) -> dict[str, float | None]:
    """Means over layers, then over sequences; None where no sequence says anything.

    ``gini``, ``top_10_percent_share`` and ``entropy`` within a sequence; ``chance``: overlap of two decode tokens of a
    sequence, drawn at random; ``likeness``: correlation, over experts, of a sequence's popularity with that in all.
    """
    pooled = popularity(trace)
    parts = list(sequences(trace))
    found = [{**_of_one(part), "likeness": _likeness(popularity(part), pooled)} for part in parts]
    means = pd.DataFrame(found, columns=[*_SKEWS, "chance", "likeness"], dtype=float).mean()
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
    """[layers, experts] each; layers in which all experts are used alike say nothing."""
    centred = [values - values.mean(axis=1, keepdims=True) for values in (one, pooled)]
    with np.errstate(invalid="ignore"):
        found = cosines(*centred)
    return float(found[np.isfinite(found)].mean()) if np.isfinite(found).any() else float("nan")


def lru_hit_rates(ids: NDArray[np.int16], experts: int) -> Floats:
    """[experts]: decode hit rates of LRU caches of 1, 2, ... experts a layer, each text from an empty cache.

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
