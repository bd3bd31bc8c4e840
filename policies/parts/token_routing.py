"""Routing that a policy makes up, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.mechanism.views import Forecast, Routing


def routing_of_tokens(ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> Routing:
    """The routing that sends each token to its ``ids``; both are [tokens][k], by descending weight."""
    workload: dict[int, int] = {}
    for chosen in ids:
        for expert in chosen:
            workload[expert] = workload.get(expert, 0) + 1
    active = tuple(sorted(workload))
    return Routing(active, tuple(workload[expert] for expert in active), ids, weights)


def scores_by_expert(forecast: Forecast) -> list[dict[int, float]]:
    """Of each token, the scores of the experts that the forecast names; empty where it has no scores."""
    if not forecast.token_scores:
        return [{} for _ in forecast.token_ids]
    return [dict(zip(*token, strict=True)) for token in zip(forecast.token_ids, forecast.token_scores, strict=True)]


def combine_weights(scores: Mapping[int, float] | Sequence[float], ids: Sequence[int], norm_topk: bool) -> list[float]:
    """What one token's experts ``ids`` weigh in its sum: their ``scores``, by expert, made to sum up to 1 if the model
    does so (``norm_topk``); equal shares where there are no scores."""
    weights = [scores[expert] for expert in ids] if scores else []
    if weights and not norm_topk:
        return weights
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else [1 / len(ids)] * len(ids)
