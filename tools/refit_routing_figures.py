"""The fit of DeepSeek-V2-Lite's routing, of which statistics are published and no trace: part of ``refit_routing``.

What the statistics do not say is that of mini-deepseek, which has the same topology; all layers are equally skewed. Hit
rates are not fitted, nor which experts are the busiest of a batch: both are checks.

Weights follow SMoE, Table I: of the time in which experts of Qwen2-57B-A14B (64 experts, top-8) are loaded, 42 parts of
71 are of those with low scores, below 1 + alpha times the best score that was not chosen. Loaded are those that an LRU
cache lacks, of as many experts as an RTX A6000 holds; a low score is more frequent among them than among all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from traces.models.catalogue import load_model, published_figures
from traces.statistics import lru_hit_rates, one_sequence_statistics, popularity_skew, token_overlap
from traces.synthesis.latent import Texts, layer_logits
from traces.synthesis.routing_model import Residual, RoutingModel
from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace
from traces.trace import Trace

MODEL = "deepseek-v2-lite"
SOURCE = "measured for Trilane"  # how the source of the figures begins
TEXTS, TOKENS, LAYERS = 60, 128, 9  # as they were measured: every third layer
LOW_SCORES, ALPHA, LOADED_TOP_K, CACHED = 42 / 71, 0.25, 8, 22
WARM_TOKENS, LOADED_TOKENS = 64, 128  # that fill the cache, and that are counted
ROUNDS, POWER = 12, 2.0  # a statistic grows with the square root of its parameter, or slower
_OTHER_SEED = 10_000


FITTED = {  # a parameter, and what is said of it, by the quantity in published.yaml
    "one_sequence_gini": ("preference_share", "in one text: Gini"),
    "overlap@1": ("autocorrelation", "used again 1 tokens later"),
    "gini": ("model_share", "popularity over texts: Gini"),
}
CHECKED: Mapping[str, str] = {
    "one_sequence_likeness": "popularity in one text and in all: correlation",
    "layer_lru_hit_rate": "hit rate, LRU per layer, 25 % cached",
}


def published() -> dict[str, float]:
    """The statistics by quantity; of a range the lower end: texts begin alike, which the upper includes."""
    return {one.quantity: one.ends[0] for one in published_figures() if one.source.startswith(SOURCE)}


def fit_figures(start: RoutingModel) -> RoutingModel:
    """``start`` with the parameters of ``FITTED`` moved until its statistics are the published ones."""
    shares = (float(np.mean(start.preference_share)),) * start.moe_layers
    fit, wanted = replace(start, preference_share=shares, residuals=()), published()
    for _ in range(ROUNDS):
        made = made_statistics(fit)
        for quantity, (parameter, _) in FITTED.items():
            factor = (wanted[quantity] / made[quantity]) ** POWER
            changed: dict[str, Any] = {parameter: _scaled(getattr(fit, parameter), factor)}
            fit = replace(fit, **changed)
    sharpness = float(np.log1p(ALPHA) / np.quantile(_gaps(fit), LOW_SCORES))  # as many low scores as published
    fit = replace(
        fit, name=MODEL, model=MODEL, text="given", forecast_accuracy={}, sharpness=sharpness,
        source="statistics of DeepSeek-V2-Lite-Chat over 60 given texts; the rest as in mini-deepseek",
    ).rounded(4)
    return replace(fit, residuals=tuple(residuals(fit))).rounded(4)


def made_statistics(fit: RoutingModel, seed: int = 0) -> dict[str, float]:
    """The published quantities, of synthetic routing."""
    trace = made_trace(fit, seed)
    single = {f"one_sequence_{name}": value for name, value in one_sequence_statistics(trace).items()}
    ids = trace.topk_ids.reshape(TEXTS, TOKENS + 1, LAYERS, fit.top_k)[:, 1:]
    return {
        **{name: value for name, value in single.items() if value is not None},
        "overlap@1": float(token_overlap(trace).mean().item()),
        "gini": float(popularity_skew(trace)["gini"].mean()),
        "layer_lru_hit_rate": float(lru_hit_rates(ids, fit.experts)[fit.experts // 4 - 1]),
    }


def made_trace(fit: RoutingModel, seed: int = 0) -> Trace:
    """The texts in which the statistics are measured; a prompt has one token."""
    fewer = replace(fit, moe_layers=LAYERS, preference_share=fit.preference_share[:LAYERS], forecast_accuracy={})
    shape = replace(load_model(MODEL), moe_layers=LAYERS)
    return synthetic_trace(shape, Synthesis(fewer, TEXTS, 1, TOKENS, seed))


def residuals(fit: RoutingModel) -> list[Residual]:
    """Published statistics, and those of synthetic routing of another seed."""
    wanted, made = published(), made_statistics(fit, _OTHER_SEED)
    low_scores = float((_gaps(fit) * fit.sharpness < np.log1p(ALPHA)).mean())
    return [
        *(Residual(about, wanted[name], made[name], True) for name, (_, about) in FITTED.items()),
        Residual("loaded experts with low scores", LOW_SCORES, low_scores, True),
        *(Residual(about, wanted[name], made[name], False) for name, about in CHECKED.items()),
    ]


def _gaps(fit: RoutingModel) -> np.ndarray:
    """How far the logits of the loaded experts are above the best that was not chosen."""
    texts = Texts(((0,),), prompt_tokens=1, generated_tokens=WARM_TOKENS + LOADED_TOKENS - 1)
    return np.concatenate([_layer_gaps(logits) for logits in layer_logits(fit, texts)])


def _layer_gaps(logits: np.ndarray) -> np.ndarray:
    """Of one layer with a cache of its own, by token and expert."""
    recent: list[int] = []
    found: list[float] = []
    for token, own in enumerate(logits):
        ranked = [int(expert) for expert in np.argsort(-own)]
        chosen, bound = ranked[:LOADED_TOP_K], own[ranked[LOADED_TOP_K]]
        if token >= WARM_TOKENS:
            found += [float(own[expert] - bound) for expert in chosen if expert not in recent]
        recent = [*(expert for expert in recent if expert not in chosen), *chosen][-CACHED:]
    return np.array(found)


def _scaled(value: float | tuple[float, ...], factor: float) -> float | tuple[float, ...]:
    return tuple(one * factor for one in value) if isinstance(value, tuple) else value * factor
