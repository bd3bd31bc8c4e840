"""The trace of a generation: blank before it begins, and made of the records of its passes when it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from policies.protocols import Needs
from realrun.generation.live_forecasts import MadeForecasts
from traces.capture.passes import Pass, place_rows, routing_rows, score_rows
from traces.capture.record import LayerRecord
from traces.layout import DECODE, PREFILL, ForecastKey, tensor_specs
from traces.models.shape import ModelShape
from traces.trace import Trace

Rows = dict[str, NDArray[Any]]


def blank_trace(
    shape: ModelShape, sequences: Sequence[int], prompt_tokens: int, generated_tokens: int, needs: Needs
) -> Trace:
    """The trace of a generation before it begins: rows in order, without routing.

    It defines the steps, and has the columns for a policy with these ``needs``.
    """
    count = min(2 * shape.top_k, shape.experts)
    keys = {ForecastKey(*pair): (count, needs.tokens) for pair in needs.forecasts}
    batch, tokens = len(sequences), len(sequences) * (prompt_tokens + generated_tokens)
    tensors: Rows = {
        name: np.zeros((tokens, *spec.row_shape), spec.dtype)
        for name, spec in tensor_specs(shape, scores=True, forecasts=keys).items()
    }
    steps = [Pass(tuple(sequences), torch.zeros(batch, prompt_tokens), 0, PREFILL)]
    for start in range(prompt_tokens, prompt_tokens + generated_tokens):
        steps.append(Pass(tuple(sequences), torch.zeros(batch, 1), start, DECODE))
    return Trace.trusted(shape, tensors | _joined([place_rows(step) for step in steps]), {}, "")


class GeneratedTrace:
    """Collects the records of passes on their devices, and makes a trace of them when the run is over.

    Forecasts that were not made, for layers of another GPU, are experts 0 to m - 1 in it: no policy is given them.
    """

    def __init__(self, rule: str, needs: Needs, count: int) -> None:
        self._rule, self._needs, self._count = rule, needs, count
        self._passes: list[tuple[Pass, list[LayerRecord], list[MadeForecasts]]] = []

    def add(self, done: Pass, records: Sequence[LayerRecord], made: list[MadeForecasts]) -> None:
        """Add one forward pass."""
        nothing = torch.empty(0)
        self._passes.append((done, [replace(record, gate_input=nothing) for record in records], made))

    def trace(self, shape: ModelShape, provenance: Mapping[str, Any]) -> Trace:
        """The trace of all passes. Raises TraceError for records that a trace cannot hold."""
        rows = [
            {
                **place_rows(done), **routing_rows(records), "scores": score_rows(records, self._rule),
                **self._forecast_rows(made, len(records), done.tokens.numel()),
            }
            for done, records, made in ((done, list(map(_on_host, here)), made) for done, here, made in self._passes)
        ]
        return Trace.from_tensors(shape, _joined(rows), provenance, where="generated trace")

    def _forecast_rows(self, made: list[MadeForecasts], layers: int, tokens: int) -> Rows:
        rows: Rows = {}
        for key in (ForecastKey(*pair) for pair in self._needs.forecasts):
            ids = np.full((tokens, layers, self._count), -1, np.int16)
            scores = np.zeros(ids.shape, np.float16)
            for layer in range(layers - key.lookahead):
                ids[:, layer], scores[:, layer] = made[layer].get(key, (np.arange(self._count), 0))
            rows[key.ids_name] = ids
            if self._needs.tokens:
                rows[key.scores_name] = scores
        return rows


def _on_host(record: LayerRecord) -> LayerRecord:
    """The parts of a record that a trace keeps, in host memory."""
    assert record.ids is not None
    assert record.weights is not None
    return replace(record, logits=record.logits.cpu(), ids=record.ids.cpu(), weights=record.weights.cpu())


def _joined(rows: Sequence[Rows]) -> Rows:
    return {name: np.concatenate([of_pass[name] for of_pass in rows]) for name in rows[0]}
