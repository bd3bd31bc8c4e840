"""Synthetic traces: routing, scores, and forecasts.

A forecast is the true logits of a later layer plus an error that leaves the stated accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.layout import (
    DECODE,
    PREFILL,
    ForecastKey,
    TraceError,
    check_size,
    forecast_keys,
    parse_forecast_name,
    tensor_specs,
)
from traces.models.shape import ModelShape
from traces.synthesis.latent import Singles, Texts, best, coarse, layer_logits, sortable
from traces.synthesis.routing_model import RoutingModel
from traces.trace import Trace
from trilane.common.hints import between
from trilane.common.schema import check

_SCORED = "partial"  # the forecast whose scores are recorded
_PILOT = Texts(((0,),), prompt_tokens=1, generated_tokens=48)  # the text on which accuracies are tried
_CACHED = 2**17  # logits that fit a processor's cache together with the arrays computed from them
_TOLERANCE = 1e-5
_ROUNDING = 4 * np.finfo(float).eps
_ERRORS = 3  # kind of random stream
_Number = Annotated[int, between(1, 1e9)]
_Seed = Annotated[int, between(0, 1e18)]


def softmax(logits: Singles, sharpness: float) -> Singles:
    """Scores of all experts: each row sums to 1."""
    scores = np.exp(np.float32(sharpness) * logits)
    return np.asarray(scores / scores.sum(axis=1, keepdims=True))


class SyntheticForecast:
    """One forecast of all tokens. All forecasts of a layer share the same error, scaled by their accuracy."""

    def __init__(self, shape: ModelShape, name: str, correlation: float, sharpness: float, tokens: int) -> None:
        parsed = parse_forecast_name(f"forecast/{name}/ids")
        assert parsed is not None  # RoutingModel checked it
        self.key: ForecastKey = parsed[0]
        self._correlation, self._sharpness = correlation, sharpness
        size = (tokens, shape.moe_layers, min(2 * shape.top_k, shape.experts))
        self.tensors: dict[str, NDArray[Any]] = {self.key.ids_name: np.full(size, -1, np.int16)}
        if self.key.kind == _SCORED:
            self.tensors[self.key.scores_name] = np.zeros(size, np.float16)

    def add(self, layer: int, logits: Singles, error: Singles) -> None:
        """Add the forecast of ``layer``; ``logits`` are its true ones. Those of the kind ``token`` stand where they are
        made; at the end of a sequence, they are of another's beginning.
        """
        made = layer - self.key.layers_ahead
        if made < 0:
            return
        guess = _guess(logits, error, self._correlation)
        if self.key.by_token:
            guess = np.roll(guess, -self.key.lookahead, axis=0)
        ids = best(guess, self.tensors[self.key.ids_name].shape[2])
        self.tensors[self.key.ids_name][:, made] = ids
        if self.key.kind == _SCORED:
            scores = np.take_along_axis(softmax(guess, self._sharpness), ids.astype(np.intp), axis=1)
            self.tensors[self.key.scores_name][:, made] = scores


def correlations(routing: RoutingModel, model_seed: int, names: Iterable[str]) -> Mapping[str, float]:
    """Correlations of guess and truth that give the wanted accuracies (on a short text), by forecast."""
    return {name: _correlation(routing, model_seed, name) for name in names}


class _Piece(NamedTuple):
    """Rows of a short text's logits [rows, experts], the experts chosen by them, and an error to add."""

    logits: Singles
    true: NDArray[np.intp]
    error: Singles

    def hits(self, correlation: float) -> int:
        """Number of true choices that a guess contains: those that are no less than the last that it has."""
        keys, count = sortable(_guess(self.logits, self.error, correlation)), self.true.shape[1]
        last = np.partition(keys, -count, axis=1)[:, -count, None]
        return int(np.count_nonzero(np.take_along_axis(keys, self.true, axis=1) >= last))


@lru_cache(maxsize=2)
def _pilot(routing: RoutingModel, model_seed: int) -> tuple[_Piece, ...]:
    """All layers of the text, in pieces that fit the processor's cache, since they are read many times."""
    logits = np.concatenate([coarse(layer) for layer in layer_logits(routing, _PILOT, model_seed)])
    error = np.random.default_rng(0).standard_normal(logits.shape, dtype=np.float32)
    whole = (logits, best(logits, routing.top_k).astype(np.intp), error)
    return tuple(map(_Piece, *(np.array_split(part, -(-logits.size // _CACHED)) for part in whole)))


@lru_cache(maxsize=64)
def _correlation(routing: RoutingModel, model_seed: int, name: str) -> float:
    wanted, pilot = routing.forecast_accuracy[name], _pilot(routing, model_seed)
    choices = sum(piece.true.size for piece in pilot)

    def excess(correlation: float) -> float:
        return sum(piece.hits(correlation) for piece in pilot) / choices - wanted

    if excess(0.0) >= 0:
        return 0.0
    return 1.0 if wanted >= 1 else bisected(excess)


def bisected(rising: Callable[[float], float]) -> float:
    """The root of an increasing function that is negative at 0 and positive at 1.

    The numbers are those of ``scipy.optimize.bisect(rising, 0, 1, xtol=1e-5)``, which takes 0.1 s to import.
    """
    low, width = 0.0, 1.0
    while True:
        width /= 2
        middle = low + width
        value = rising(middle)
        if value < 0:
            low = middle
        if value == 0 or width < _TOLERANCE + _ROUNDING * middle:
            return middle


def _guess(logits: Singles, error: Singles, correlation: float) -> Singles:
    guess = np.float32(correlation) * logits
    guess += np.float32(np.sqrt(1 - correlation**2)) * error
    return coarse(guess)


@dataclass(frozen=True)
class Synthesis:
    """A synthetic trace to make. Another ``seed`` gives other texts of the model, another ``model_seed`` another model.

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
    by_name = correlations(request.routing, request.model_seed, request.forecast_names)
    makers = [SyntheticForecast(shape, name, how, request.routing.sharpness, tokens) for name, how in by_name.items()]
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
