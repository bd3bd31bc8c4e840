"""Parameters of synthetic routing, estimated from a trace, with the residuals.

Fitted are overlaps between tokens, numbers of different experts, predictability across layers and router weights.
Cache hit rates are not fitted; they serve as a check.

Each parameter moves by the error of its own statistic. Overlaps are translated into correlations first, which gives
steps of about the right size: there "the k best of E" is replaced by a threshold, and an expert is chosen if its normal
variate exceeds the quantile of k / E. Every round uses the same random numbers, so that the iteration converges and the
result is reproducible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri, owens_t

from traces.layout import TraceError
from traces.statistics import forecast_statistics
from traces.synthesis.latent import Texts, best, layer_logits
from traces.synthesis.measured import (
    LAGS,
    LEAST_ANSWER,
    LEAST_PROMPT,
    WINDOWS,
    Choices,
    Floats,
    OverlapStatistics,
    choices_of,
    measure,
    measure_trace,
    middle,
)
from traces.synthesis.routing_model import Residual, RoutingModel
from traces.synthesis.synthetic_trace import softmax
from traces.trace import Trace

ROUNDS = 16
SLOWER, FASTER, PACES = 0.6, 1.15, (0.1, 1.5)  # a parameter that overshot moves slower, one that did not faster
FITTED_WINDOWS = 2  # the widest that the trace has
_TEXTS = 10  # at least this many are generated; of as many models if the trace has a single text
_LIMITS: Mapping[str, tuple[float, float]] = {
    "preference_share": (0.01, 0.98),
    "preference_tail": (-1.5, 1.5),
    "prompt_preference_share": (0.05, 1.5),
    "prompt_likeness": (0.0, 1.0),
    "model_share": (0.0, 1.0),
    "autocorrelation": (-0.3, 0.95),
    "layer_drift": (0.0, 0.5),
    "noise_share": (0.0, 0.9),
}
_GRID = np.linspace(-0.95, 0.9999, 4000)
WIDTHS = (3, 4, 5, 6, 8, 10, 12, 16, 24)
MODEL_SHARE = 0.04  # for traces of one text: that of mini-deepseek; 0.03 gives the 10 % of llama.cpp#27861
_OTHER_SEED = 10_000  # residuals come from other random numbers than the estimate
_SHARPNESS = (0.05, 12.0)
_TEXT = Texts(((0,),), prompt_tokens=1, generated_tokens=48)  # to which the shape of the weights is fitted
DIGITS = 4


class Layout(NamedTuple):
    """Texts generated per round: as many as the trace has, all of the median length."""

    texts: int
    prompt_tokens: int
    generated_tokens: int

    @classmethod
    def of(cls, texts: list[Choices]) -> Layout:
        lengths = [(len(text.prompt), len(text.answer)) for text in texts]
        prompt, answer = (int(np.median(column)) for column in zip(*lengths, strict=True))
        return cls(len(texts), prompt, answer)

    @property
    def models(self) -> int:
        """Number of models that generate texts."""
        return max(1, _TEXTS // self.texts)


def tuned(real: OverlapStatistics, start: RoutingModel, layout: Layout) -> RoutingModel:
    """``start``, moved until its statistics are those of ``real``; state_width does not change."""
    fit, paces, last = start, {name: _paced(1.0) for name in _LIMITS}, {name: _paced(0.0) for name in _LIMITS}
    for _ in range(ROUNDS):
        moves = {name: _paced(move) for name, move in _moves(fit, real, simulated(fit, layout)).items()}
        for name, move in moves.items():
            paces[name] = np.clip(paces[name] * np.where(move * last[name] < 0, SLOWER, FASTER), *PACES)
        fit = replace(fit, **{name: _within(name, getattr(fit, name), paces[name] * moves[name]) for name in moves})
        last = moves
    return fit


def simulated(fit: RoutingModel, layout: Layout, seed: int = 0) -> OverlapStatistics:
    """Statistics of synthetic routing, as the mean over models. Another ``seed`` gives other texts and models."""
    return middle([_simulated(fit, layout, seed, number) for number in range(layout.models)])


def _simulated(fit: RoutingModel, layout: Layout, seed: int, number: int) -> OverlapStatistics:
    texts = Texts(
        tuple((seed, number, text) for text in range(layout.texts)), layout.prompt_tokens, layout.generated_tokens
    )
    ids = np.stack([best(logits, fit.top_k) for logits in layer_logits(fit, texts, seed + number)], axis=1)
    made = ids.reshape(layout.texts, -1, *ids.shape[1:])
    prompt = layout.prompt_tokens
    return measure([Choices(text[:prompt], text[prompt:]) for text in made], fit.experts)


def _moves(fit: RoutingModel, real: OverlapStatistics, made: OverlapStatistics) -> dict[str, Any]:
    """Estimated error of each parameter; NaN where the trace has no statistic for it."""

    def deficit(name: str) -> Any:
        share = fit.top_k / fit.experts
        return correlation_of(getattr(real, name), share) - correlation_of(getattr(made, name), share)

    preferred = float(np.mean(fit.preference_share))
    widest = np.flatnonzero(np.isfinite(real.distinct))[-FITTED_WINDOWS:]
    return {
        "preference_share": deficit("far"),
        "autocorrelation": (deficit("lags") - deficit("far").mean()) / (1 - preferred),
        "preference_tail": 0.4 * np.log(made.distinct[widest] / real.distinct[widest]).mean(),
        "prompt_preference_share": 2 * np.log(made.prompt_distinct / real.prompt_distinct),
        "prompt_likeness": deficit("prompt_answer") / (preferred * fit.prompt_preference_share**0.5),
        "model_share": deficit("across") / preferred,
        "noise_share": 0.5 * (made.gain - real.gain),
        "layer_drift": 0.1 * (made.far_gain / made.gain - real.far_gain / real.gain),
    }


def _paced(value: Any) -> Floats:
    return np.nan_to_num(np.asarray(value, np.float64))


def _within(name: str, value: Any, move: Floats) -> Any:
    moved = np.clip(np.asarray(value) + move, *_LIMITS[name])
    return tuple(moved.tolist()) if isinstance(value, tuple) else float(moved)


def overlap_of(correlation: Floats, share: float) -> Floats:
    """P(one is chosen | the other is), for two standard normal variates and ``share`` = k / E of all chosen.

    By Owen's T function: P(X > h, Y > h) = Phi(-h) - 2 T(h, sqrt((1 - r) / (1 + r))); D. B. Owen, Tables for Computing
    Bivariate Normal Probabilities, Annals of Mathematical Statistics 27 (1956).
    """
    threshold = -ndtri(share)
    slope = np.sqrt((1 - correlation) / (1 + correlation))
    return np.asarray((ndtr(-threshold) - 2 * owens_t(threshold, slope)) / share)


def correlation_of(overlap: Floats | float, share: float) -> Floats:
    """The correlation that gives ``overlap``; the inverse of ``overlap_of``, clipped to -0.95 .. 0.9999."""
    return np.asarray(np.interp(overlap, overlap_of(_GRID, share), _GRID))


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
    """The sharpness that makes the weights by rank as the trace's."""
    logits = np.concatenate(list(layer_logits(fit, _TEXT)))
    wanted = _mean_weights(trace)

    def miss(sharpness: float) -> float:
        return float(((_weights(logits, fit.top_k, sharpness, trace.shape.norm_topk) - wanted) ** 2).sum())

    return float(minimize_scalar(miss, bounds=_SHARPNESS, method="bounded").x)


def _weights(logits: np.ndarray, top_k: int, sharpness: float, norm_topk: bool) -> Floats:
    """Mean weights by rank [k]."""
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
        Residual(name, float(of_trace), float(synthetic), bool(fitted))
        for name, of_trace, synthetic, fitted in rows
        if np.isfinite(of_trace)
    ]
