"""Synthetic traces by name: ``synthetic:MODEL``, and the calibration trace that belongs to it.

A model without a recorded trace has the routing of the nearest stored model, adapted to its shape. Where each parameter
comes from:

1. All but the forecasts come from the stored model of the same name; else from the one with the most similar number
   of experts and experts per token (least sum of |log2 of the ratios|; the first in the file of equals).
2. Experts, experts per token and layers are those of the model. Shares are kept; those of the layers are interpolated
   over the relative depth.
3. The accuracy of a forecast is that measured on a trace of the same model; else that published for the model
   (``traces/models/published.yaml``, the median of several figures); else that measured on the trace of the stored
   model, or, if it has no forecasts, on the bundled trace with the most similar shape. Gates further ahead, and
   the gate with residuals (``residual@1``), keep their ratio to gate@1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import log2

import numpy as np

from traces.layout import TraceError
from traces.models.catalogue import load_model, original, published_figures
from traces.models.names import parted
from traces.models.shape import ModelShape
from traces.synthesis.routing_model import RoutingModel, stored_models
from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace
from traces.trace import Trace
from trilane.common.quoting import quoted

_DIGITS = 4
_GATES = ("gate@", "residual@")  # forecasts that a gate makes of the present input
PREFIX = "synthetic:"
CALIBRATION = "-calibration"
_NO_FORECAST = "none"
_NAME = re.compile(
    r"synthetic:(?P<model>[^/]+?|.+\.(?:json|gguf))(?P<calibration>-calibration)?"
    rf"(?:/(\d{{1,9}})x(\d{{1,9}})\+(\d{{1,9}})(?:/(?P<forecasts>{_NO_FORECAST}|[a-z_]+@\d+(?:,[a-z_]+@\d+)*))?)?"
)
_EVALUATION_SEED, _CALIBRATION_SEED = 0, 1


def nearest_routing(shape: ModelShape, fit: RoutingModel | None = None) -> RoutingModel:
    """Routing for ``shape``, from ``fit`` or the nearest stored model; ``source`` says where each part is from."""
    fit = fit or _nearest(shape, stored_models())
    accuracy, about = _forecast_accuracy(shape, fit)
    return replace(_adapted(shape, fit), forecast_accuracy=accuracy, source=f"{_taken(shape, fit)}; {about}")


def _adapted(shape: ModelShape, fit: RoutingModel) -> RoutingModel:
    """``fit`` adapted to the layers, experts and experts per token of ``shape``."""
    depth, ours = ((np.arange(layers) + 0.5) / layers for layers in (fit.moe_layers, shape.moe_layers))
    shares = np.interp(ours, depth, fit.preference_share)
    return replace(
        fit, moe_layers=shape.moe_layers, experts=shape.experts, top_k=shape.top_k,
        preference_share=tuple(map(float, shares)),
    )


def _forecast_accuracy(shape: ModelShape, fit: RoutingModel) -> tuple[Mapping[str, float], str]:
    """Accuracy@k by forecast, and its source."""
    same = bool(fit.forecast_accuracy) and fit.model == _base_name(shape)
    published = {} if same else _published(shape)
    recorded = {name: one for name, one in stored_models().items() if one.forecast_accuracy}
    measured = fit if fit.forecast_accuracy else _nearest(shape, recorded)
    known = measured.forecast_accuracy
    ratio = published["gate@1"] / known["gate@1"] if "gate@1" in published and "gate@1" in known else 1.0
    accuracy = {name: value * ratio if name.startswith(_GATES) else value for name, value in known.items()}
    rest = f"forecasts as accurate as in {measured.name}"
    about = f"{', '.join(published)} as accurate as published for {_base_name(shape)}, other {rest}"
    rounded = {name: round(value, _DIGITS) for name, value in {**accuracy, **published}.items()}
    return rounded, about if published else rest


def _base_name(shape: ModelShape) -> str:
    """The model's name in the catalogue, without the suffixes of cut or quantised ones; of an alias, its model's."""
    return original(parted(shape.name).model)


def _nearest(shape: ModelShape, fits: Mapping[str, RoutingModel]) -> RoutingModel:
    def distance(fit: RoutingModel) -> tuple[bool, float]:
        ratios = (shape.experts / fit.experts, shape.top_k / fit.top_k)
        return fit.model != _base_name(shape), sum(abs(log2(ratio)) for ratio in ratios)

    return min(fits.values(), key=distance)


def _taken(shape: ModelShape, fit: RoutingModel) -> str:
    of = f"{fit.source}; {fit.moe_layers} layers, {fit.experts} experts, top-{fit.top_k}"
    made = f"made to the {shape.moe_layers} layers, {shape.experts} experts, top-{shape.top_k} of {shape.name}"
    return f"fitted to {fit.name} ({of}), {made}"


def _published(shape: ModelShape) -> dict[str, float]:
    """Published accuracies of the model's forecasts."""
    accuracies: dict[str, list[float]] = {}
    for figure in published_figures():
        if "@" in figure.quantity and figure.model.lower().startswith(_base_name(shape)):
            accuracies.setdefault(figure.quantity, []).append(float(np.mean(figure.ends)))
    return {name: float(np.median(values)) for name, values in accuracies.items() if not name.startswith("overlap@")}


def is_synthetic(name: str) -> bool:
    return name.startswith(PREFIX)


def load_synthetic(name: str) -> Trace:
    """``synthetic:qwen3-30b-a3b``: 20 sequences of 64 + 64 tokens; ``.../4x4096+32``: 4 of 4,096 + 32;
    ``.../4x4096+32/gate@1,residual@1``: with these forecasts only, as far as the routing model has them (``none``:
    without any), which takes less time. The same name is always the same trace.

    Raises ShapeError for an unknown model and TraceError for lengths that cannot be read.
    """
    return _made(name, load_model(_parsed(name)[0]))


@lru_cache(maxsize=4)
def _made(name: str, shape: ModelShape) -> Trace:
    _, calibration, counts, forecasts = _parsed(name)
    seed = _CALIBRATION_SEED if calibration else _EVALUATION_SEED
    lengths = dict(zip(("sequences", "prompt_tokens", "generated_tokens"), counts, strict=bool(counts)))
    return synthetic_trace(shape, Synthesis(nearest_routing(shape), seed=seed, forecasts=forecasts, **lengths))


def synthetic_calibration_of(name: str) -> str | None:
    """The name of the calibration trace: other texts of the same model, of the default lengths."""
    model, calibration, *_ = _parsed(name)
    return None if calibration else f"{PREFIX}{model}{CALIBRATION}"


def with_lengths(name: str, sequences: int, prompt_tokens: int, generated_tokens: int, forecasts: Iterable[str]) -> str:
    """The name of the same model's trace with these lengths and these forecasts only."""
    return f"{name}/{sequences}x{prompt_tokens}+{generated_tokens}/{','.join(forecasts) or _NO_FORECAST}"


def _parsed(name: str) -> tuple[str, bool, tuple[int, ...], tuple[str, ...] | None]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise TraceError(
            f"trace {quoted(name)}: expected synthetic:MODEL, or synthetic:MODEL/SEQUENCESxPROMPT+GENERATED such as "
            f"synthetic:qwen3-30b-a3b/4x256+32"
        )
    counts = tuple(int(count) for count in match.groups()[2:5] if count)
    forecasts = None if match["forecasts"] is None else tuple(match["forecasts"].split(","))
    return match["model"], bool(match["calibration"]), counts, forecasts
