"""The page of ``trilane quality``: effects of policies on the text, with their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from policies.registry import system
from trilane.output.figures.marks import marked
from trilane.output.figures.quality_words import nats
from trilane.output.pages.output import Part, heading, legend, number, percent, signed_percent, table
from trilane.study.quality.summary import Quality, TextMean, front
from trilane.study.quality.table import HALF

YARDSTICK = "best-exact"  # the policy that speeds are relative to
_COLUMNS = ("", "policy", "ms/token", "KL\nnats", "\n95%", "same first\ntoken", "\n95%", "perplexity", "\n95%",
            "weight\nmoved", "KL, first\nquarter", "\nlast", "drift,\nlast layer")
_MEANINGS = {
    "KL": "Kullback-Leibler divergence of the next token from the exact run's, mean over tokens",
    "95%": "of the means over resampled texts (bootstrap)",
    "weight moved": "routing weight that is substituted, mispredicted, dropped, stale, deferred or narrowed",
    "drift": "share of the last router's own choices that are not those of the exact run",
    ">": "on the front: none that is as fast is nearer to the exact run",
}


def quality_page(found: Sequence[Quality], about: str) -> list[Part]:
    """A table for each model, fastest first."""
    parts: list[Part] = [heading(about)]
    for model in dict.fromkeys(quality.model for quality in found):
        own = sorted((q for q in found if q.model == model), key=lambda q: (q.tpot_ms, q.choice))
        best = {quality.choice for quality in front(own)}
        texts = f"{model}: {own[0].texts} texts, {own[0].tokens} tokens of each; exact perplexity "
        parts += ["", heading(texts + number(own[0].exact_perplexity, 2)),
                  table(_COLUMNS, [_line(quality, quality.choice in best) for quality in own], 2)]
    return [*parts, legend(_MEANINGS)]


def overview_page(found: Sequence[Quality], about: str) -> list[Part]:
    """One line a policy with its own parameters: speed and divergence on every model, the most faithful first."""
    models = list(dict.fromkeys(quality.model for quality in found))
    half = {(q.model, q.choice): q for q in found if q.cached_share == HALF}
    names = [name for name in dict.fromkeys(q.choice for q in found) if all((m, name) in half for m in models)]
    shown = sorted((name for name in names if "{" not in name), key=lambda name: _mean_nats(name, models, half))
    rows = [
        [marked(name, system(name).needs.kind),
         *(cell for m in models for cell in _cells(half[m, name], half[m, YARDSTICK])),
         percent(float(np.mean([half[m, name].agreement.mean for m in models])), 1)]
        for name in shown
    ]
    columns = ["policy", *(text for model in models for text in (f"{model}\nspeed", "\nKL")), "same first\ntoken"]
    sizes = [f"{m}: {half[m, YARDSTICK].texts} texts, {half[m, YARDSTICK].tokens} tokens of each" for m in models]
    return [heading(about), table(columns, rows), "\n" + "; ".join(sizes), legend({
        "speed": f"time per token of {YARDSTICK}, which keeps the routing, over that of the policy",
        "KL": _MEANINGS["KL"], "same first token": "mean over the models",
    })]


def _mean_nats(name: str, models: Sequence[str], found: Mapping[tuple[str, str], Quality]) -> float:
    return float(np.mean([found[model, name].kl.mean for model in models]))


def _cells(quality: Quality, yardstick: Quality) -> tuple[str, str]:
    return f"{yardstick.tpot_ms / quality.tpot_ms:.2f}x", nats(quality.kl.mean)


def _line(quality: Quality, on_front: bool) -> list[str]:
    by_position = quality.kl_by_position
    return [
        ">" if on_front else "", quality.choice, number(quality.tpot_ms, 2),
        nats(quality.kl.mean), _range(quality.kl, nats),
        percent(quality.agreement.mean, 1), _range(quality.agreement, lambda value: f"{100 * value:.1f}"),
        signed_percent(quality.perplexity_change.mean),
        _range(quality.perplexity_change, lambda value: f"{100 * value:+.1f}"),
        percent(quality.moved_share, 1), nats(by_position[0]), nats(by_position[-1]),
        percent(quality.drift_by_layer[-1], 1),
    ]


def _range(interval: TextMean, text: Callable[[float], str]) -> str:
    low, high = text(interval.low), text(interval.high)
    return low if low == high else f"{low} to {high}"
