"""The fit of Mixtral-8x7B's routing, of which repetitions are published and no trace: part of ``refit_routing``.

Mixtral of Experts (arXiv 2401.04088), Table 5: how often a token and the next one have an expert in common, and how
often the first choice, in the first, a middle and the last layer, on eight subsets of The Pile. How much of it is the
text's and how much the neighbour's is not said: both parts are those of mini-moe, another model with two experts a
token, times one factor; all layers are equally skewed. First choices and hit rates are not fitted; they are checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from traces.models.catalogue import load_model
from traces.statistics import lru_hit_rates
from traces.synthesis.routing_model import Residual, RoutingModel
from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace

REPEATED = "mixtral-8x7b"
LAYERS = (0, 15, 31)
IN_COMMON = (0.4804, 0.6369, 0.5091)  # "First or second choice", means of the eight subsets
FIRST = (0.1409, 0.2640, 0.2268)  # "First choice"
RANDOM = 1 - 6 / 8 * 5 / 7  # in common, were experts drawn at random
LRU = {2: 0.302, 6: 0.806}  # HybriMoE, Fig. 9, by cached experts of 8
TEXTS, TOKENS, ROUNDS = 40, 128, 6
_OTHER_SEED = 10_000


class Repetitions(NamedTuple):
    """Shares of adjacent tokens, mean over layers; and the decode tokens' experts [texts, tokens, layers, k]."""

    in_common: float
    first: float
    ids: np.ndarray


def fit_repetitions(start: RoutingModel) -> RoutingModel:
    """``start``, made to Mixtral's shape, as persistent as published."""
    shape = load_model(REPEATED)
    fit = replace(
        start, name=REPEATED, model=REPEATED, moe_layers=shape.moe_layers, experts=shape.experts, top_k=shape.top_k,
        preference_share=(float(np.mean(start.preference_share)),) * shape.moe_layers, text="given",
        source="Mixtral of Experts, Table 5; the rest as in mini-moe", forecast_accuracy={}, residuals=(),
    )
    for _ in range(ROUNDS):
        fit = _scaled(fit, (mean_over_layers(IN_COMMON) - RANDOM) / (repetitions(fit).in_common - RANDOM))
    fit = fit.rounded(4)
    return replace(fit, residuals=tuple(_residuals(repetitions(fit, _OTHER_SEED)))).rounded(4)


def mean_over_layers(values: Sequence[float]) -> float:
    """Of all layers, with those between ``LAYERS`` interpolated."""
    return float(np.interp(np.arange(LAYERS[-1] + 1), LAYERS, values).mean())


def repetitions(fit: RoutingModel, seed: int = 0) -> Repetitions:
    """Of synthetic routing; a prompt has one token."""
    trace = synthetic_trace(load_model(fit.model), Synthesis(fit, TEXTS, 1, TOKENS, seed))
    ids = trace.topk_ids.reshape(TEXTS, TOKENS + 1, fit.moe_layers, fit.top_k)[:, 1:]
    one, following = ids[:, :-1], ids[:, 1:]
    in_common = (one[..., :, None] == following[..., None, :]).any(axis=(-1, -2))
    return Repetitions(float(in_common.mean()), float((one[..., 0] == following[..., 0]).mean()), ids)


def _scaled(fit: RoutingModel, factor: float) -> RoutingModel:
    """Both parts of what makes neighbours alike, times ``factor``."""
    return replace(
        fit, preference_share=tuple(share * factor for share in fit.preference_share),
        autocorrelation=tuple(one * factor for one in fit.autocorrelation),
    )


def _residuals(made: Repetitions) -> list[Residual]:
    rates = lru_hit_rates(made.ids, 8)
    return [
        Residual("an expert in common with the token before", mean_over_layers(IN_COMMON), made.in_common, True),
        Residual("the same first choice as the token before", mean_over_layers(FIRST), made.first, False),
        *(
            Residual(f"hit rate, LRU per layer, {cached} of 8 cached", rate, float(rates[cached - 1]), False)
            for cached, rate in LRU.items()
        ),
    ]
