"""Parameters of synthetic routing, estimated from a trace, with the residuals.

Fitted are overlaps between tokens, numbers of different experts, predictability across layers and router weights.
Cache hit rates are not fitted; they serve as a check.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from traces.layout import TraceError
from traces.statistics import forecast_statistics
from traces.synthesis.forecasts import softmax
from traces.synthesis.latent import Texts, layer_logits
from traces.synthesis.measured import (
    LAGS,
    LEAST_ANSWER,
    LEAST_PROMPT,
    WINDOWS,
    Floats,
    OverlapStatistics,
    choices_of,
    measure_trace,
)
from traces.synthesis.moments import FITTED_WINDOWS, Layout, simulated, tuned
from traces.synthesis.routing_model import Residual, RoutingModel
from traces.trace import Trace

WIDTHS = (3, 4, 5, 6, 8, 10, 12, 16, 24)
MODEL_SHARE = 0.04  # for traces of one text: that of mini-deepseek; 0.03 gives the 10 % of llama.cpp#27861
_OTHER_SEED = 10_000  # residuals come from other random numbers than the estimate
_SHARPNESS = (0.05, 12.0)
_TEXT = Texts(((0,),), prompt_tokens=1, generated_tokens=48)  # to which the shape of the weights is fitted
DIGITS = 4


def estimate_routing(trace: Trace, name: str, model: str, source: str) -> RoutingModel:
    """The parameters of routing like that of ``trace``, with the residuals. Takes seconds.

    ``name``: of the result; ``model``: name of the trace's model in the catalogue; ``source``: of the trace.
    Raises TraceError if no sequence has enough decode tokens to measure persistence.
    """
    texts = choices_of(trace)
    if not texts:
        raise TraceError(
            f"fit to {name}: expected a sequence of at least {LEAST_PROMPT} prompt and {LEAST_ANSWER} decode tokens, "
            "found none; capture longer ones"
        )
    real, layout = measure_trace(trace), Layout.of(texts)
    fit = _of_best_width(real, _start(trace, name, model, source), layout)
    accuracy = _forecast_accuracy(trace)
    fit = replace(fit, sharpness=_sharpness(trace, fit), forecast_accuracy=accuracy).rounded(DIGITS)
    made = simulated(fit, layout, _OTHER_SEED)
    return replace(fit, residuals=tuple(_residuals(trace, fit, real, made))).rounded(DIGITS)


def _start(trace: Trace, name: str, model: str, source: str) -> RoutingModel:
    shape = trace.shape
    return RoutingModel(
        name=name, model=model, source=source, moe_layers=shape.moe_layers, experts=shape.experts, top_k=shape.top_k,
        preference_share=(0.4,) * shape.moe_layers, preference_tail=0.0, prompt_preference_share=0.6,
        prompt_likeness=0.8, model_share=MODEL_SHARE, autocorrelation=(0.2,) * LAGS, state_width=WIDTHS[0],
        layer_drift=0.02, noise_share=0.02, sharpness=1.0, forecast_accuracy={},
        text="given" if trace.provenance.get("text") == "given" else "generated",
    )


class _Tried(NamedTuple):
    fit: RoutingModel
    miss: float


def _of_best_width(real: OverlapStatistics, start: RoutingModel, layout: Layout) -> RoutingModel:
    """The wider a token's state, the less alike two tokens are by chance: tried until that is passed."""
    best: _Tried | None = None
    for width in WIDTHS:
        fit = tuned(real, replace(start, state_width=width), layout)
        made = simulated(fit, layout)
        tried = _Tried(fit, abs(float(np.log(made.spread / real.spread))) + abs(float(np.log(made.gain / real.gain))))
        if best is not None and tried.miss > best.miss:
            break
        best = tried
    assert best is not None
    return best.fit


def _sharpness(trace: Trace, fit: RoutingModel) -> float:
    """That makes the weights by rank as the trace's."""
    logits = np.concatenate(list(layer_logits(fit, _TEXT)))
    wanted = _mean_weights(trace)

    def miss(sharpness: float) -> float:
        return float(((_weights(logits, fit.top_k, sharpness, trace.shape.norm_topk) - wanted) ** 2).sum())

    return float(minimize_scalar(miss, bounds=_SHARPNESS, method="bounded").x)


def _weights(logits: np.ndarray, top_k: int, sharpness: float, norm_topk: bool) -> Floats:
    """[k]: mean weight by rank."""
    weights = np.sort(softmax(logits, sharpness), axis=1)[:, : -top_k - 1 : -1]
    return np.asarray((weights / weights.sum(axis=1, keepdims=True) if norm_topk else weights).mean(axis=0), np.float64)


def _mean_weights(trace: Trace) -> Floats:
    return np.asarray(trace.topk_weights.astype(np.float64).mean(axis=(0, 1)))


def _forecast_accuracy(trace: Trace) -> dict[str, float]:
    means = forecast_statistics(trace).groupby("forecast")["accuracy_at_k"].mean()
    return {str(name): float(value) for name, value in means.items()}


def _residuals(trace: Trace, fit: RoutingModel, real: OverlapStatistics, made: OverlapStatistics) -> list[Residual]:
    """Every statistic that the trace can say; the ones that nothing was fitted to are there to check."""
    logits = np.concatenate(list(layer_logits(fit, _TEXT)))
    wanted, weights = _mean_weights(trace), _weights(logits, fit.top_k, fit.sharpness, trace.shape.norm_topk)
    widest = np.flatnonzero(np.isfinite(real.distinct))[-FITTED_WINDOWS:]
    rows = [
        *((f"used again {lag} tokens later", real.lags[lag - 1], made.lags[lag - 1], True) for lag in (1, 2, 4, 8, 16)),
        ("used again later than that", real.far.mean(), made.far.mean(), True),
        ("the same, spread over layers", real.far.std(), made.far.std(), True),
        ("used by a token of another text", real.across, made.across, True),
        ("prompt token's used in the answer", real.prompt_answer, made.prompt_answer, True),
        ("prompt token's used in the prompt", real.prompt, made.prompt, False),
        ("likeness of two tokens, spread", real.spread, made.spread, True),
        ("cross-layer gain, next layer", real.gain, made.gain, True),
        ("cross-layer gain, 8 layers ahead", real.far_gain, made.far_gain, True),
        *(
            (f"different experts of {window} tokens", real.distinct[place], made.distinct[place], place in widest)
            for place, window in enumerate(WINDOWS)
        ),
        ("different experts of a prompt", real.prompt_distinct, made.prompt_distinct, True),
        ("weight of the first expert", wanted[0], weights[0], True),
        ("weight of the last expert", wanted[-1], weights[-1], True),
    ]
    return [
        Residual(name, float(there), float(here), bool(fitted))
        for name, there, here, fitted in rows
        if np.isfinite(there)
    ]
