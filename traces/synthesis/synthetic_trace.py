"""Synthetic traces: routing, scores, and forecasts of stated accuracy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from traces.layout import DECODE, PREFILL, TraceError, check_size, forecast_keys, tensor_specs
from traces.models.shape import ModelShape
from traces.synthesis.forecasts import SyntheticForecast, correlations, softmax
from traces.synthesis.latent import Texts, layer_logits
from traces.synthesis.routing_model import RoutingModel
from traces.synthesis.topk import best, coarse
from traces.trace import Trace
from trilane.common.hints import between
from trilane.common.schema import check

_ERRORS = 3  # kind of random stream
_Number = Annotated[int, between(1, 1e9)]
_Seed = Annotated[int, between(0, 1e18)]


@dataclass(frozen=True)
class Synthesis:
    """What to generate. Another ``seed`` gives other texts of the same model, another ``model_seed`` another model.

    ``forecasts``: these alone (as far as ``routing`` has them), such as ``("gate@1",)``; None: all. The rest of the
    trace is the same.
    """

    routing: RoutingModel
    sequences: _Number = 20
    prompt_tokens: _Number = 64
    generated_tokens: _Number = 64
    seed: _Seed = 0
    model_seed: _Seed = 0
    forecasts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check(self, TraceError)

    @property
    def forecast_names(self) -> list[str]:
        """The forecasts to make, in the order of the routing."""
        return [name for name in self.routing.forecast_accuracy if self.forecasts is None or name in self.forecasts]

    @property
    def texts(self) -> Texts:
        seeds = tuple((self.seed, number) for number in range(self.sequences))
        return Texts(seeds, self.prompt_tokens, self.generated_tokens)


def synthetic_trace(shape: ModelShape, request: Synthesis) -> Trace:
    """Routing for ``shape``, with the scores of all experts and forecasts.

    Raises TraceError if the routing is for other layers, experts or top-k.
    """
    for name in ("moe_layers", "experts", "top_k"):
        if getattr(shape, name) != getattr(request.routing, name):
            raise TraceError(
                f"synthetic trace: expected routing with {name} = {getattr(shape, name)} for {shape.name}, got "
                f"{getattr(request.routing, name)} of {request.routing.name}"
            )
    length = request.prompt_tokens + request.generated_tokens
    kept = dict.fromkeys(forecast_keys(f"forecast/{name}/ids" for name in request.forecast_names), (shape.top_k, False))
    check_size("synthetic trace", tensor_specs(shape, scores=True, forecasts=kept), request.sequences * length)
    tensors = _routed(shape, request)
    phase = np.repeat([PREFILL, DECODE], [request.prompt_tokens, request.generated_tokens])
    tensors |= {
        "sequence": np.repeat(np.arange(request.sequences, dtype=np.int32), length),
        "position": np.tile(np.arange(length, dtype=np.int32), request.sequences),
        "phase": np.tile(phase.astype(np.uint8), request.sequences),
    }
    return Trace.from_tensors(shape, tensors, _provenance(shape, request))


def _provenance(shape: ModelShape, request: Synthesis) -> dict[str, Any]:
    routing = request.routing
    return {
        "model": shape.name,
        "synthetic": routing.source,
        "text": routing.text,
        "seed": request.seed,
        "model_seed": request.model_seed,
        "routing": replace(routing, residuals=()).to_dict(),
    }


def _routed(shape: ModelShape, request: Synthesis) -> dict[str, NDArray[Any]]:
    """All outputs of the routers: [tokens, layers, ...]."""
    tokens, layers = request.texts.tokens, shape.moe_layers
    tensors: dict[str, NDArray[Any]] = {
        "topk_ids": np.empty((tokens, layers, shape.top_k), np.int16),
        "topk_weights": np.empty((tokens, layers, shape.top_k), np.float16),
        "scores": np.empty((tokens, layers, shape.experts), np.float16),
    }
    found = correlations(request.routing, request.model_seed, request.forecast_names)
    makers = [SyntheticForecast(shape, name, how, request.routing.sharpness, tokens) for name, how in found.items()]
    errors = np.random.default_rng((_ERRORS, request.seed))
    for layer, exact in enumerate(layer_logits(request.routing, request.texts, request.model_seed)):
        logits = coarse(exact)
        scores = softmax(logits, request.routing.sharpness)
        ids = best(logits, shape.top_k)
        weights = np.take_along_axis(scores, ids.astype(np.intp), axis=1)
        tensors["topk_ids"][:, layer], tensors["scores"][:, layer] = ids, scores
        tensors["topk_weights"][:, layer] = weights / weights.sum(1, keepdims=True) if shape.norm_topk else weights
        if makers:
            error = errors.standard_normal(logits.shape, dtype=np.float32)
            for maker in makers:
                maker.add(layer, logits, error)
    for maker in makers:
        tensors |= maker.tensors
    return tensors
