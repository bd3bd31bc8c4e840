"""Routing for a model whose routing nobody has recorded: of the nearest model that was fitted, made to its shape.

What is taken from where:

1. All but the forecasts is that of the stored fit whose trace is of the same model; else of the one with the most
   similar number of experts and experts per token (least |log2 of their ratios|, of two equals the first of the file).
2. Experts, experts per token and layers are the model's. The shares stay, so that more experts per token share more;
   those of each layer are interpolated over the relative depth.
3. The accuracy of a forecast is what was measured on a trace of the same model; else what is published for the model
   (``traces/models/published.yaml``, the middle of several figures); else what was measured on the trace that the rest
   is taken from, or, if that has no forecasts, on the bundled trace with the most similar shape. Gates further
   ahead keep their ratio to gate@1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log2

import numpy as np

from traces.models.published import published_figures
from traces.models.shape import ModelShape
from traces.synthesis.routing_model import RoutingModel, stored_models

_DIGITS = 4


def nearest_routing(shape: ModelShape, fit: RoutingModel | None = None) -> RoutingModel:
    """Routing for ``shape``, from ``fit`` or the nearest stored one; its ``source`` says what was taken from where."""
    fit = fit or _nearest(shape, stored_models())
    accuracy, about = _forecast_accuracy(shape, fit)
    return replace(_made_to(shape, fit), forecast_accuracy=accuracy, source=f"{_taken(shape, fit)}; {about}")


def _made_to(shape: ModelShape, fit: RoutingModel) -> RoutingModel:
    """``fit`` for other numbers of layers, experts and experts per token."""
    depth, ours = ((np.arange(layers) + 0.5) / layers for layers in (fit.moe_layers, shape.moe_layers))
    shares = np.interp(ours, depth, fit.preference_share)
    return replace(
        fit, moe_layers=shape.moe_layers, experts=shape.experts, top_k=shape.top_k,
        preference_share=tuple(map(float, shares)),
    )  # fmt: skip


def _forecast_accuracy(shape: ModelShape, fit: RoutingModel) -> tuple[Mapping[str, float], str]:
    """Accuracy@k by forecast, and where it is from."""
    same = bool(fit.forecast_accuracy) and fit.model == _base_name(shape)
    published = {} if same else _published(shape)
    recorded = {name: one for name, one in stored_models().items() if one.forecast_accuracy}
    measured = fit if fit.forecast_accuracy else _nearest(shape, recorded)
    known = measured.forecast_accuracy
    ratio = published["gate@1"] / known["gate@1"] if "gate@1" in published and "gate@1" in known else 1.0
    accuracy = {name: value * ratio if name.startswith("gate@") else value for name, value in known.items()}
    rest = f"forecasts as accurate as in {measured.name}"
    about = f"{', '.join(published)} as accurate as published for {_base_name(shape)}, other {rest}"
    rounded = {name: round(value, _DIGITS) for name, value in {**accuracy, **published}.items()}
    return rounded, about if published else rest


def _base_name(shape: ModelShape) -> str:
    """The model's name in the catalogue, without what was cut or quantised."""
    return shape.name.partition(":")[0].partition("@")[0]


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
    found: dict[str, list[float]] = {}
    for figure in published_figures():
        if "@" in figure.quantity and figure.model.lower().startswith(_base_name(shape)):
            found.setdefault(figure.quantity, []).append(float(np.mean(figure.value)))
    return {name: float(np.median(values)) for name, values in found.items() if not name.startswith("overlap@")}
