"""Makes ``routing_models.yaml``: ``python -m tools.refit_routing --logs FOLDER``.

The folder holds the two logs that are not bundled, ``qwen.route.csv`` and ``gemma.route.csv``, of Helldez/BigMoeOnEdge
(https://github.com/Helldez/BigMoeOnEdge, Apache-2.0). Without it, their stored fits stay. gpt-oss-20b is fitted to its
calibration trace; the evaluated one is a check. Of two models figures are published, and no trace:

DeepSeek-V2-Lite. What its statistics do not say is that of mini-deepseek, which has the same topology; all layers are
equally skewed. Hit rates are not fitted, nor which experts are the busiest of a batch: both are checks. Weights follow
SMoE, Table I: of the time in which experts of Qwen2-57B-A14B (64 experts, top-8) are loaded, 42 parts of 71 are of
those with low scores, below 1 + alpha times the best score that was not chosen. Loaded are those that an LRU cache
lacks, of as many experts as an RTX A6000 holds; a low score is more frequent among them than among all.

Mixtral-8x7B. Mixtral of Experts (arXiv 2401.04088), Table 5: how often a token and the next one have an expert in
common, and how often the first choice, in the first, a middle and the last layer, on eight subsets of The Pile. How
much of it is the text's and how much the neighbour's is not said: both parts are those of mini-moe, another model with
two experts a token, times one factor; all layers are equally skewed. First choices and hit rates are checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import yaml

from traces.importers.route_trace_v1 import import_route_trace
from traces.library import load_trace
from traces.models.catalogue import load_model, published_figures
from traces.statistics import lru_hit_rates, one_sequence_statistics, popularity_skew, token_overlap
from traces.synthesis.estimate import estimate_routing
from traces.synthesis.latent import Texts, layer_logits
from traces.synthesis.routing_model import STORED, Residual, RoutingModel, stored_models
from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace
from traces.trace import Trace
from trilane.common.files import atomic_path

LOGS: Mapping[str, str] = {"qwen": "qwen3-30b-a3b", "gemma": "gemma-4-26b-a4b"}  # file -> model
BUNDLED: Mapping[str, str] = {  # model -> trace
    "mini-deepseek": "mini-deepseek", "mini-moe": "mini-moe", "gpt-oss-20b": "gpt-oss-20b-calibration",
}
_HEAD = "# Made by `python -m tools.refit_routing`: see there, and traces/synthesis/routing_model.py for the keys.\n"
_OTHER_SEED = 10_000  # of the texts that residuals are taken from
TOKENS = 128  # of a text

# --- DeepSeek-V2-Lite, from statistics -------------------------------------------------------------------------------

MODEL = "deepseek-v2-lite"
SOURCE = "measured for Trilane"  # how the source of the figures begins
TEXTS, LAYERS = 60, 9  # as they were measured: every third layer
LOW_SCORES, ALPHA, LOADED_TOP_K, CACHED = 42 / 71, 0.25, 8, 22
WARM_TOKENS, LOADED_TOKENS = 64, 128  # that fill the cache, and that are counted
ROUNDS, POWER = 12, 2.0  # a statistic grows with the square root of its parameter, or slower
FITTED = {  # quantity in published.yaml -> parameter, words
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
            fit = _scaled(fit, (wanted[quantity] / made[quantity]) ** POWER, parameter)
    sharpness = float(np.log1p(ALPHA) / np.quantile(_gaps(fit), LOW_SCORES))  # as many low scores as published
    fit = replace(
        fit, name=MODEL, model=MODEL, text="given", forecast_accuracy={}, sharpness=sharpness,
        source="statistics of DeepSeek-V2-Lite-Chat over 60 given texts; the rest as in mini-deepseek",
    ).rounded(4)
    return replace(fit, residuals=tuple(_figure_residuals(fit, wanted))).rounded(4)


def made_statistics(fit: RoutingModel, seed: int = 0) -> dict[str, float]:
    """The published quantities, of synthetic routing."""
    trace = _figures_trace(fit, seed)
    single = {f"one_sequence_{name}": value for name, value in one_sequence_statistics(trace).items()}
    ids = trace.topk_ids.reshape(TEXTS, TOKENS + 1, LAYERS, fit.top_k)[:, 1:]
    return {
        **{name: value for name, value in single.items() if value is not None},
        "overlap@1": float(token_overlap(trace).mean().item()),
        "gini": float(popularity_skew(trace)["gini"].mean()),
        "layer_lru_hit_rate": float(lru_hit_rates(ids, fit.experts)[fit.experts // 4 - 1]),
    }


def _figures_trace(fit: RoutingModel, seed: int) -> Trace:
    """The texts in which the statistics are measured; a prompt has one token."""
    fewer = replace(fit, moe_layers=LAYERS, preference_share=fit.preference_share[:LAYERS], forecast_accuracy={})
    shape = replace(load_model(MODEL), moe_layers=LAYERS)
    return synthetic_trace(shape, Synthesis(fewer, TEXTS, 1, TOKENS, seed))


def _figure_residuals(fit: RoutingModel, wanted: Mapping[str, float]) -> list[Residual]:
    """Published statistics, and those of synthetic routing of another seed."""
    made = made_statistics(fit, _OTHER_SEED)
    low_scores = float((_gaps(fit) * fit.sharpness < np.log1p(ALPHA)).mean())
    return [
        *(Residual(about, wanted[name], made[name], True) for name, (_, about) in FITTED.items()),
        Residual("loaded experts with low scores", LOW_SCORES, low_scores, True),
        *(Residual(about, wanted[name], made[name], False) for name, about in CHECKED.items()),
    ]


def _gaps(fit: RoutingModel) -> np.ndarray:
    """Logits of the loaded experts above the best that was not chosen, each layer with a cache of its own."""
    texts = Texts(((0,),), prompt_tokens=1, generated_tokens=WARM_TOKENS + LOADED_TOKENS - 1)
    return np.array([gap for logits in layer_logits(fit, texts) for gap in _layer_gaps(logits)])


def _layer_gaps(logits: np.ndarray) -> list[float]:
    """Gaps in one layer, by token and expert."""
    recent: list[int] = []
    gaps: list[float] = []
    for token, own in enumerate(logits):
        ranked = [int(expert) for expert in np.argsort(-own)]
        chosen, bound = ranked[:LOADED_TOP_K], own[ranked[LOADED_TOP_K]]
        if token >= WARM_TOKENS:
            gaps += [float(own[expert] - bound) for expert in chosen if expert not in recent]
        recent = [*(expert for expert in recent if expert not in chosen), *chosen][-CACHED:]
    return gaps


def _scaled(fit: RoutingModel, factor: float, *parameters: str) -> RoutingModel:
    """``fit`` with some parameters, numbers or lists of them, times ``factor``."""
    values = {name: getattr(fit, name) for name in parameters}
    changed: dict[str, Any] = {
        name: tuple(one * factor for one in value) if isinstance(value, tuple) else value * factor
        for name, value in values.items()
    }
    return replace(fit, **changed)


# --- Mixtral-8x7B, from repetitions ----------------------------------------------------------------------------------

REPEATED = "mixtral-8x7b"
PILE_TEXTS, PILE_LAYERS, PILE_ROUNDS = 40, (0, 15, 31), 6
IN_COMMON = (0.4804, 0.6369, 0.5091)  # "First or second choice", means of the eight subsets
FIRST = (0.1409, 0.2640, 0.2268)  # "First choice"
RANDOM = 1 - 6 / 8 * 5 / 7  # in common, were experts drawn at random
LRU = {2: 0.302, 6: 0.806}  # HybriMoE, Fig. 9, by cached experts of 8


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
    for _ in range(PILE_ROUNDS):
        factor = (mean_over_layers(IN_COMMON) - RANDOM) / (repetitions(fit).in_common - RANDOM)
        fit = _scaled(fit, factor, "preference_share", "autocorrelation")
    fit = fit.rounded(4)
    return replace(fit, residuals=tuple(_repetition_residuals(repetitions(fit, _OTHER_SEED)))).rounded(4)


def mean_over_layers(values: Sequence[float]) -> float:
    """The mean over all layers, of which those between ``PILE_LAYERS`` are interpolated."""
    return float(np.interp(np.arange(PILE_LAYERS[-1] + 1), PILE_LAYERS, values).mean())


def repetitions(fit: RoutingModel, seed: int = 0) -> Repetitions:
    """Repetitions in synthetic routing; a prompt has one token."""
    trace = synthetic_trace(load_model(fit.model), Synthesis(fit, PILE_TEXTS, 1, TOKENS, seed))
    ids = trace.topk_ids.reshape(PILE_TEXTS, TOKENS + 1, fit.moe_layers, fit.top_k)[:, 1:]
    one, following = ids[:, :-1], ids[:, 1:]
    in_common = (one[..., :, None] == following[..., None, :]).any(axis=(-1, -2))
    return Repetitions(float(in_common.mean()), float((one[..., 0] == following[..., 0]).mean()), ids)


def _repetition_residuals(made: Repetitions) -> list[Residual]:
    rates = lru_hit_rates(made.ids, 8)
    return [
        Residual("an expert in common with the token before", mean_over_layers(IN_COMMON), made.in_common, True),
        Residual("the same first choice as the token before", mean_over_layers(FIRST), made.first, False),
        *(
            Residual(f"hit rate, LRU per layer, {cached} of 8 cached", rate, float(rates[cached - 1]), False)
            for cached, rate in LRU.items()
        ),
    ]


# --- traces ----------------------------------------------------------------------------------------------------------


def refit_bundled(name: str) -> RoutingModel:
    """The fit of a bundled trace, called as its model is."""
    return estimate_routing(load_trace(BUNDLED[name]), name, name, f"the bundled trace {BUNDLED[name]}")


def refit_log(folder: Path, name: str) -> RoutingModel:
    """The fit of a log that is not bundled."""
    file = f"{name}.route.csv"
    return estimate_routing(import_route_trace(folder / file), name, LOGS[name], f"Helldez/BigMoeOnEdge, {file}")


def main(
    logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="with qwen.route.csv and gemma.route.csv")
    ] = None
) -> None:
    """Fit, and write the file aside and rename it."""
    of_logs = [stored_models()[name] if logs is None else refit_log(logs, name) for name in LOGS]
    bundled = {name: refit_bundled(name) for name in BUNDLED}
    from_figures = fit_figures(bundled["mini-deepseek"]), fit_repetitions(bundled["mini-moe"])
    fits = [fit.to_dict() for fit in (*of_logs, *from_figures, *bundled.values())]  # of equally near ones, the first
    documents = {fit.pop("name"): fit for fit in fits}
    text = yaml.safe_dump(documents, sort_keys=False, default_flow_style=None, width=118)
    with atomic_path(STORED) as aside:
        aside.write_text(_HEAD + text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
