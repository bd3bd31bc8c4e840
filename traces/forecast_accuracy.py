"""How often forecasts of a trace are right, layer by layer, at batch 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.layout import DECODE, ForecastKey
from traces.trace import Trace, rows_apart


class ForecastAccuracy(NamedTuple):
    """Of one forecast about one layer. ``accuracy_at_k``: |first k forecast experts ∩ the k true ones| / k;
    ``recall_at_m``: the same with all m recorded."""

    forecast: str
    layer: int
    accuracy_at_k: float
    recall_at_m: float


def forecast_accuracies(trace: Trace) -> Iterator[ForecastAccuracy]:
    """Of every forecast, in order, and every layer that was forecast, over decode tokens (all if there are none)."""
    decode = np.flatnonzero(trace.phase == DECODE)
    rows = decode if len(decode) else np.arange(len(trace))
    for key in sorted(trace.forecasts):
        yield from _of_layers(trace, key, rows)


def accuracies_by_layer(trace: Trace) -> dict[tuple[str, int], NDArray[np.float64]]:
    """``accuracy_at_k`` of each forecast (kind, lookahead), [layers]; NaN where a layer was not forecast."""
    accuracies = {str(key): np.full(trace.shape.moe_layers, np.nan) for key in trace.forecasts}
    for found in forecast_accuracies(trace):
        accuracies[found.forecast][found.layer] = found.accuracy_at_k
    return {(key.kind, key.lookahead): accuracies[str(key)] for key in trace.forecasts}


def _of_layers(trace: Trace, key: ForecastKey, rows: NDArray[np.intp]) -> Iterator[ForecastAccuracy]:
    k, about = trace.shape.top_k, rows
    if key.by_token:
        later = rows_apart(trace, key.lookahead)[rows]
        rows, about = rows[np.isin(later, rows)], later[np.isin(later, rows)]
    for layer in range(key.layers_ahead, trace.shape.moe_layers) if len(rows) else ():
        forecast = trace.forecasts[key].ids[rows, layer - key.layers_ahead]
        found = (forecast[:, :, None] == trace.topk_ids[about, layer][:, None, :]).any(axis=2)
        accuracy, recall = found[:, :k].sum(axis=1).mean() / k, found.sum(axis=1).mean() / k
        yield ForecastAccuracy(str(key), layer, accuracy, recall)
