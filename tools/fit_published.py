"""Makes ``published_models.yaml`` and ``routing_kinds.yaml``: ``python -m tools.fit_published``.

Fits routing models to what is published of a model's routing (``traces/models/published_routing.yaml``), and factors to
what is published of a kind of text.

Fitted are the share of the preferences and the autocorrelation of what changes, each times a factor: both factors to
several hit rates of LRU caches, one and the same for both to a single statistic. To the popularity over all texts the
share of preferences common to them is fitted. The rest is that of the statistic's ``start``, the most alike of the
models that have a trace or statistics of whole texts; all layers are equally skewed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from traces.models.catalogue import load_model
from traces.synthesis.families import nearest_stored
from traces.synthesis.named import adapted
from traces.synthesis.published import PublishedRouting, made, published_routing
from traces.synthesis.routing_model import KINDS, PUBLISHED, Residual, RoutingModel, scaled, stored_models
from trilane.common.files import atomic_path

_HEAD = "# Made by `python -m tools.fit_published`: see there.\n"
OTHER_SEED = 10_000  # of the texts that residuals are taken from
STEPS = (0.4, 0.2, 0.1, 0.05, 0.025, 0.0125)  # of the logarithms of factors
MOST = 0.98  # of the preferences, common to all texts


def main() -> None:
    """Fit, and write the files aside and rename them."""
    starts = {one.model: one.start for one in published_routing() if one.start}
    fits = [fit_model(model, stored_models()[start]).to_dict() for model, start in starts.items()]
    _write(PUBLISHED, {fit.pop("name"): fit for fit in fits})
    stored_models.cache_clear()
    _write(KINDS, fit_kinds())


def _write(path: Path, document: Mapping[str, Any]) -> None:
    text = yaml.safe_dump(dict(document), sort_keys=False, default_flow_style=None, width=118)
    with atomic_path(path) as aside:
        aside.write_text(_HEAD + text, encoding="utf-8")


def fit_model(model: str, start: RoutingModel) -> RoutingModel:
    """``start``, made to the model's shape and fitted to what is published of it."""
    mine = [one for one in published_routing() if one.model == model and not one.kind]
    fitted = [one for one in mine if one.fitted]
    sources = ", ".join(dict.fromkeys(one.source for one in fitted))
    own = replace(
        _even(adapted(load_model(model), start)), name=model, model=model, forecast_accuracy={}, residuals=(),
        text="given" if fitted[0].quantity == "pooled" else "generated",
        source=f"{sources}; the rest as in {start.name}",
    )
    found = fit_factors(own, fitted).rounded(4)
    return replace(found, residuals=tuple(_residuals(found, mine))).rounded(4)


def fit_kinds() -> dict[str, dict[str, dict[str, object]]]:
    """Factors of preferences and of the autocorrelation by model and kind of text, with their sources."""
    found: dict[str, dict[str, dict[str, object]]] = {}
    for model, kind in dict.fromkeys((one.model, one.kind) for one in published_routing() if one.kind):
        mine = [one for one in published_routing() if (one.model, one.kind) == (model, kind)]
        shape = load_model(model)
        start = adapted(shape, nearest_stored(shape).fit)
        fit = fit_factors(start, mine)
        found.setdefault(model, {})[kind] = {
            "preference": round(float(np.mean(fit.preference_share) / np.mean(start.preference_share)), 4),
            "change": round(fit.autocorrelation[0] / start.autocorrelation[0], 4),
            "source": mine[0].source,
        }
    return found


def fit_factors(start: RoutingModel, statistics: Sequence[PublishedRouting]) -> RoutingModel:
    """``start`` with the factors that bring it nearest to the statistics."""
    if all(one.quantity == "pooled" for one in statistics):
        return descended(statistics, lambda logs: replace(start, model_share=_common(logs)), 1)
    single = sum(len(one.values) for one in statistics) == 1
    return descended(statistics, lambda logs: scaled(start, *np.exp(logs[[0, -1]]).tolist()), 1 if single else 2)


def _common(logs: np.ndarray) -> float:
    """The share of the preferences that is common to all texts; a tenth to begin with."""
    return min(0.1 * float(np.exp(logs[0])), MOST)


def descended(
    statistics: Sequence[PublishedRouting], at: Callable[[np.ndarray], RoutingModel], unknowns: int
) -> RoutingModel:
    """Coordinate descent: one logarithm after the other, in steps that become smaller."""
    logs = np.zeros(unknowns)
    best = error_of(at(logs), statistics)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for move in (sign * step * unit for unit in np.eye(unknowns) for sign in (1, -1)):
                error = error_of(at(logs + move), statistics)
                if error < best:
                    best, logs, moved = error, logs + move, True
    return at(logs)


def error_of(fit: RoutingModel, statistics: Iterable[PublishedRouting]) -> float:
    """The sum of the squared differences."""
    return sum(
        (here - there) ** 2
        for one in statistics
        for here, there in zip(made(fit, one), one.values.values(), strict=True)
    )


def _even(fit: RoutingModel) -> RoutingModel:
    return replace(fit, preference_share=(float(np.mean(fit.preference_share)),) * fit.moe_layers)


def _residuals(fit: RoutingModel, statistics: Iterable[PublishedRouting]) -> list[Residual]:
    """Published statistics, and the same of synthetic routing of other texts."""
    return [
        Residual(f"{WORDS[one.quantity]} {size}", there, here, one.fitted)
        for one in statistics
        for (size, there), here in zip(one.values.items(), made(fit, one, OTHER_SEED), strict=True)
    ]


WORDS = {
    "lru": "hit rate, LRU per layer, share cached:", "overlap": "used again, tokens later:",
    "pooled": "choices on the most popular experts over texts, of all experts:",
    "one_text": "choices on the most popular experts in one text, of all experts:",
}


if __name__ == "__main__":
    main()
