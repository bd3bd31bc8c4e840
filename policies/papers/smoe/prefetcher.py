"""SMoE's prefetching (Section IV-C): the next layer's top-score experts, forecast by a partial forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView, PolicyError
from policies.parts.forecasts import next_forecast


class TopScorePrefetcher:
    """Absent experts of the next layer whose forecast score exceeds (1 + ``alpha``) times the token's (k+1)-th, by
    descending score, until the next layer's own loads begin.

    They go into the cache, where the eviction of Section IV-B makes room: the paper has no other place for what it
    prefetches. Where several tokens want an expert its highest score counts (ours). The forecast's top-score experts
    that are there already are protected until the next foresight (ours), or one prefetch would displace another.
    """

    into: Literal["cache", "staging"] = "cache"

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Top-score experts of the next layer that are not resident there."""
        layer = view.layer + 1
        return [
            ExpertId(layer, expert)
            for expert in self._top(view, forecasts)
            if expert not in view.residency.resident[layer]
        ]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """All top-score experts of the next layer."""
        return frozenset(ExpertId(view.layer + 1, expert) for expert in self._top(view, forecasts))

    def _top(self, view: LayerView, forecasts: Sequence[Forecast]) -> list[int]:
        """Top-score experts of any token, by descending forecast score, ties to the lower id."""
        forecast = next_forecast(view, forecasts, "partial")
        if forecast is None:
            return []
        if len(forecast.token_scores) < len(forecast.token_ids):
            raise PolicyError(
                f"SMoE's prefetcher, layer {view.layer}: expected the scores of forecast partial@1 for "
                f"{len(forecast.token_ids)} tokens, got {len(forecast.token_scores)}: declare Needs(tokens=True) and "
                f"use a trace that holds them"
            )
        k = len(view.routing.token_ids[0])
        best: dict[int, float] = {}
        for ids, scores in zip(forecast.token_ids, forecast.token_scores, strict=True):
            bound = (1 + self.alpha) * scores[k] if len(scores) > k else 0.0
            for expert, score in zip(ids[:k], scores, strict=False):
                if score > bound:
                    best[expert] = max(score, best.get(expert, 0.0))
        return sorted(best, key=lambda expert: (-best[expert], expert))
