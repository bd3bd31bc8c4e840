"""Synthetic traces by name: ``synthetic:MODEL``, and the calibration trace that belongs to it.

A model without a recorded trace has the routing of the nearest stored model, adapted to its shape. Where each parameter
comes from:

1. All but the forecasts come from the stored model of the same name; else from the nearest of its router's family
   (``traces.synthesis.families``).
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
from typing import NamedTuple

import numpy as np

from traces.layout import TraceError
from traces.models.catalogue import load_model, published_figures
from traces.models.shape import ModelShape
from traces.synthesis.families import base_name, nearest_stored, octaves
from traces.synthesis.routing_model import RoutingModel, scaled, stored_models, text_kinds
from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace
from traces.trace import Trace
from trilane.common.quoting import quoted

_DIGITS = 4
_GATES = ("gate@", "residual@")  # forecasts that a gate makes of the present input
PREFIX = "synthetic:"
CALIBRATION = "-calibration"
_NO_FORECAST = "none"
_NAME = re.compile(
    r"synthetic:(?P<model>[^/~]+?|.+\.(?:json|gguf))(?:~(?P<kind>[^/~]+?))?(?P<calibration>-calibration)?"
    rf"(?:/(?P<sequences>\d{{1,9}})x(?P<prompt>\d{{1,9}})\+(?P<generated>\d{{1,9}})"
    rf"(?:/(?P<forecasts>{_NO_FORECAST}|[a-z_]+@\d+(?:,[a-z_]+@\d+)*))?)?"
)
_EVALUATION_SEED, _CALIBRATION_SEED = 0, 1
_RELATED = {"own statistics": "", "family": ", of the same family of routers", "nearest": ", the nearest"}


def nearest_routing(shape: ModelShape, fit: RoutingModel | None = None) -> RoutingModel:
    """Routing for ``shape``, from ``fit`` or the nearest stored model; ``source`` says where each part is from."""
    related = "" if fit else _RELATED[nearest_stored(shape).basis]
    fit = fit or nearest_stored(shape).fit
    accuracy, about = _forecast_accuracy(shape, fit)
    return replace(adapted(shape, fit), forecast_accuracy=accuracy, source=f"{_taken(shape, fit, related)}; {about}")


def adapted(shape: ModelShape, fit: RoutingModel) -> RoutingModel:
    """``fit`` adapted to the layers, experts and experts per token of ``shape``."""
    depth, ours = ((np.arange(layers) + 0.5) / layers for layers in (fit.moe_layers, shape.moe_layers))
    shares = np.interp(ours, depth, fit.preference_share)
    return replace(
        fit, moe_layers=shape.moe_layers, experts=shape.experts, top_k=shape.top_k,
        preference_share=tuple(map(float, shares)),
    )


def _forecast_accuracy(shape: ModelShape, fit: RoutingModel) -> tuple[Mapping[str, float], str]:
    """Accuracy@k by forecast, and its source."""
    same = bool(fit.forecast_accuracy) and fit.model == base_name(shape)
    published = {} if same else _published(shape)
    recorded = {name: one for name, one in stored_models().items() if one.forecast_accuracy}
    measured = fit if fit.forecast_accuracy else min(
        recorded.values(), key=lambda one: (one.model != base_name(shape), octaves(shape, one))
    )
    known = measured.forecast_accuracy
    ratio = published["gate@1"] / known["gate@1"] if "gate@1" in published and "gate@1" in known else 1.0
    accuracy = {name: value * ratio if name.startswith(_GATES) else value for name, value in known.items()}
    rest = f"forecasts as accurate as in {measured.name}"
    about = f"{', '.join(published)} as accurate as published for {base_name(shape)}, other {rest}"
    rounded = {name: round(value, _DIGITS) for name, value in {**accuracy, **published}.items()}
    return rounded, about if published else rest


def _taken(shape: ModelShape, fit: RoutingModel, related: str) -> str:
    of = f"{fit.source}; {fit.moe_layers} layers, {fit.experts} experts, top-{fit.top_k}"
    made = f"made to the {shape.moe_layers} layers, {shape.experts} experts, top-{shape.top_k} of {shape.name}"
    return f"fitted to {fit.name}{related} ({of}), {made}"


def of_kind(shape: ModelShape, kind: str) -> RoutingModel:
    """Routing of a kind of text that is published for the model. Raises TraceError for another."""
    kinds = text_kinds().get(base_name(shape), {})
    if kind not in kinds:
        known = ", ".join(f"{model}: {', '.join(of)}" for model, of in text_kinds().items())
        raise TraceError(
            f"kind of text {quoted(kind)}: expected one whose statistics are published for {base_name(shape)}; "
            f"published are {known}"
        )
    one, stored = kinds[kind], nearest_stored(shape).fit
    return nearest_routing(shape, replace(
        scaled(stored, one.preference, one.change), source=f"{stored.source}; text: {kind} ({one.source})"
    ))


def _published(shape: ModelShape) -> dict[str, float]:
    """Published accuracies of the model's forecasts."""
    accuracies: dict[str, list[float]] = {}
    for figure in published_figures():
        if "@" in figure.quantity and figure.model.lower().startswith(base_name(shape)):
            accuracies.setdefault(figure.quantity, []).append(float(np.mean(figure.ends)))
    return {name: float(np.median(values)) for name, values in accuracies.items() if not name.startswith("overlap@")}


def is_synthetic(name: str) -> bool:
    return name.startswith(PREFIX)


def load_synthetic(name: str) -> Trace:
    """``synthetic:qwen3-30b-a3b``: 20 sequences of 64 + 64 tokens; ``.../4x4096+32``: 4 of 4,096 + 32;
    ``.../4x4096+32/gate@1,residual@1``: with these forecasts only, as far as the routing model has them (``none``:
    without any), which takes less time. ``synthetic:qwen3-30b-a3b~summary``: of a kind of text, where it is published
    for the model. The same name is always the same trace.

    Raises ShapeError for an unknown model and TraceError for lengths that cannot be read and for another kind of text.
    """
    return _made(name, load_model(_parsed(name).model))


@lru_cache(maxsize=4)
def _made(name: str, shape: ModelShape) -> Trace:
    asked = _parsed(name)
    seed = _CALIBRATION_SEED if asked.calibration else _EVALUATION_SEED
    lengths = dict(zip(("sequences", "prompt_tokens", "generated_tokens"), asked.counts, strict=bool(asked.counts)))
    routing = nearest_routing(shape) if asked.kind is None else of_kind(shape, asked.kind)
    return synthetic_trace(shape, Synthesis(routing, seed=seed, forecasts=asked.forecasts, **lengths))


def synthetic_calibration_of(name: str) -> str | None:
    """The name of the calibration trace: other texts of the same model and kind, of the default lengths."""
    asked = _parsed(name)
    kind = "" if asked.kind is None else f"~{asked.kind}"
    return None if asked.calibration else f"{PREFIX}{asked.model}{kind}{CALIBRATION}"


def with_lengths(name: str, sequences: int, prompt_tokens: int, generated_tokens: int, forecasts: Iterable[str]) -> str:
    """The name of the same model's trace with these lengths and these forecasts only."""
    return f"{name}/{sequences}x{prompt_tokens}+{generated_tokens}/{','.join(forecasts) or _NO_FORECAST}"


class _Asked(NamedTuple):
    """The parts of a name."""

    model: str
    kind: str | None
    calibration: bool
    counts: tuple[int, ...]
    forecasts: tuple[str, ...] | None


def _parsed(name: str) -> _Asked:
    match = _NAME.fullmatch(name)
    if match is None:
        raise TraceError(
            f"trace {quoted(name)}: expected synthetic:MODEL, synthetic:MODEL~TEXT for a kind of text, or "
            f"synthetic:MODEL/SEQUENCESxPROMPT+GENERATED such as synthetic:qwen3-30b-a3b/4x256+32"
        )
    counts = tuple(int(match[part]) for part in ("sequences", "prompt", "generated") if match[part])
    forecasts = None if match["forecasts"] is None else tuple(match["forecasts"].split(","))
    return _Asked(match["model"], match["kind"], bool(match["calibration"]), counts, forecasts)
