"""Forecasts of a trace: how often they are right, layer by layer, at batch 1; and noisy ones for traces that hold none.

Noisy forecasts are the true routing of a later layer, with errors of a stated rate. No model made them: they show how a
policy performs *if* forecasts are that good. Results call them noisy forecasts and state their recall.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.layout import DECODE, ForecastKey
from traces.models.shape import ModelShape
from traces.trace import Trace, rows_apart

_BY_TOKEN = 1  # makes other draws for forecasts of later tokens


class ForecastAccuracy(NamedTuple):
    """Accuracy of one forecast about one layer. ``accuracy_at_k``: |first k forecast experts ∩ the k true ones| / k;
    ``recall_at_m``: the same with all m recorded."""

    forecast: str
    layer: int
    accuracy_at_k: float
    recall_at_m: float


def forecast_accuracies(trace: Trace) -> Iterator[ForecastAccuracy]:
    """Accuracies of every forecast, in order, and every layer that was forecast, over decode tokens (over all if there
    are none)."""
    decode = np.flatnonzero(trace.phase == DECODE)
    rows = decode if len(decode) else np.arange(len(trace))
    for key in sorted(trace.forecasts):
        yield from _of_layers(trace, key, rows)


def accuracies_by_layer(trace: Trace) -> dict[tuple[str, int], NDArray[np.float64]]:
    """``accuracy_at_k`` of each forecast (kind, lookahead), [layers]; NaN where a layer was not forecast."""
    accuracies = {str(key): np.full(trace.shape.moe_layers, np.nan) for key in trace.forecasts}
    for accuracy in forecast_accuracies(trace):
        accuracies[accuracy.forecast][accuracy.layer] = accuracy.accuracy_at_k
    return {(key.kind, key.lookahead): accuracies[str(key)] for key in trace.forecasts}


def _of_layers(trace: Trace, key: ForecastKey, rows: NDArray[np.intp]) -> Iterator[ForecastAccuracy]:
    k, about = trace.shape.top_k, rows
    if key.by_token:
        later = rows_apart(trace, key.lookahead)[rows]
        rows, about = rows[np.isin(later, rows)], later[np.isin(later, rows)]
    for layer in range(key.layers_ahead, trace.shape.moe_layers) if len(rows) else ():
        forecast = trace.forecasts[key].ids[rows, layer - key.layers_ahead]
        hits = (forecast[:, :, None] == trace.topk_ids[about, layer][:, None, :]).any(axis=2)
        accuracy, recall = hits[:, :k].sum(axis=1).mean() / k, hits.sum(axis=1).mean() / k
        yield ForecastAccuracy(str(key), layer, accuracy, recall)


class NoisyForecasts(NamedTuple):
    """``recalls[d - 1]`` is the recall@k, 0 to 1, of forecasts of the d-th layer ahead, of the kind ``token`` of the
    d-th token; all of it follows from ``seed``.

    All kinds of one look-ahead in layers have the same errors, so that policies that need different kinds can be
    compared.
    """

    recalls: tuple[float, ...]
    seed: int = 0

    def __str__(self) -> str:
        return f"noisy forecasts (recall {', '.join(f'{recall:g}' for recall in self.recalls)})"

    def reach(self, lookahead: int) -> bool:
        return lookahead <= len(self.recalls)

    def ids(self, trace: Trace, rows: NDArray[np.intp], key: ForecastKey) -> NDArray[np.int16]:
        """The forecast of some rows; see ``noisy_ids``. Of the kind ``token``, ``rows`` are those that it is about."""
        recall = self.recalls[key.lookahead - 1]
        if key.by_token:
            return _noisy(trace.topk_ids[rows], rows, trace.shape, recall, (self.seed, key.lookahead, _BY_TOKEN))
        return noisy_ids(trace, rows, key.lookahead, recall, self.seed)


def noisy_ids(trace: Trace, rows: NDArray[np.intp], lookahead: int, recall: float, seed: int) -> NDArray[np.int16]:
    """Noisy forecasts [rows, L, m], m = min(2k, E): made at layer l for layer l + lookahead, -1 past the last layer.

    Each true expert keeps its place among the first k with probability ``recall``; otherwise a random other expert
    takes it. The places after k go to further random experts, and to missed true experts only when no other is left
    (so the first k cannot miss all of them where E < 2k). The forecast of a row does not depend on the other ``rows``.
    """
    shape = trace.shape
    ids = np.full((len(rows), shape.moe_layers, min(2 * shape.top_k, shape.experts)), -1, np.int16)
    true = trace.topk_ids[rows, lookahead:]
    ids[:, : true.shape[1]] = _noisy(true, rows, shape, recall, (seed, lookahead))
    return ids


def _noisy(
    true: NDArray[np.int16], rows: NDArray[np.intp], shape: ModelShape, recall: float, seeds: tuple[int, ...]
) -> NDArray[np.int16]:
    """Noisy forecasts [rows, layers, m] of the true experts of these rows [rows, layers, k]."""
    k, experts, (_, made, _) = shape.top_k, shape.experts, true.shape
    if not true.size:
        return np.empty((*true.shape[:2], min(2 * k, experts)), np.int16)
    draws = np.stack([_draws(seeds, int(row), (made, experts + k)) for row in rows])
    hit = draws[..., experts:] < recall
    # Free places are filled by other experts in random order, then by missed true experts; hits keep their places.
    order = draws[..., :experts].copy()
    np.put_along_axis(order, true.astype(np.intp), np.where(hit, 2 * k, 1) + np.arange(k), axis=-1)
    taken = np.zeros(order.shape, np.bool_)
    taken[..., :k] = hit
    ranked = np.empty(order.shape, np.int16)
    np.put_along_axis(ranked, np.argsort(taken, axis=-1, kind="stable"), np.argsort(order, axis=-1), axis=-1)
    return ranked[..., : min(2 * k, experts)]


def _draws(seeds: tuple[int, ...], row: int, size: tuple[int, int]) -> NDArray[np.float64]:
    """Numbers of one row: [layers, experts] for the order of the others, then [layers, k] for hit or miss."""
    return np.random.default_rng((*(seed % 2**32 for seed in seeds), row)).random(size)
