"""Fitting of the parameters of synthetic routing to the statistics of a trace.

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
from scipy.special import ndtr, ndtri, owens_t

from traces.synthesis.latent import Texts, layer_logits
from traces.synthesis.measured import Choices, Floats, OverlapStatistics, measure, middle
from traces.synthesis.routing_model import RoutingModel
from traces.synthesis.topk import best

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
