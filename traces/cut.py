"""Traces with less: their first layers alone, for models that are too large to run whole, or no forecasts."""

from __future__ import annotations

import numpy as np

from traces.layout import TraceError, parse_forecast_name
from traces.trace import Trace

_BY_LAYER = ("topk_ids", "topk_weights", "scores")


def first_layers(trace: Trace, layers: int) -> Trace:
    """``trace`` with MoE layers 0 to ``layers`` - 1, without the forecasts of later layers.

    Its checksum is that of the whole trace followed by ``:layers``. Raises TraceError if the trace has fewer layers.
    """
    shape = trace.shape
    if not 1 <= layers <= shape.moe_layers:
        raise TraceError(f"trace {shape.name}:{layers}: expected 1 to {shape.moe_layers} layers after the colon")
    tensors = {}
    for name, array in trace.tensors().items():
        forecast = parse_forecast_name(name)
        if name in _BY_LAYER or forecast:
            array = array[:, :layers]
        if forecast:
            nothing, past = (-1 if forecast[1] == "ids" else 0), max(0, layers - forecast[0].layers_ahead)
            array = np.where(np.arange(layers)[:, None] < past, array, array.dtype.type(nothing))
        tensors[name] = array
    return Trace.trusted(shape.first_layers(layers), tensors, trace.provenance, f"{trace.checksum}:{layers}")


def without_forecasts(trace: Trace) -> Trace:
    """``trace`` without what was forecast. Its checksum is that of the whole trace followed by ``:no-forecasts``."""
    tensors = {name: array for name, array in trace.tensors().items() if not parse_forecast_name(name)}
    return Trace.trusted(trace.shape, tensors, trace.provenance, f"{trace.checksum}:no-forecasts")
