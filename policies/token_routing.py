"""Routing that a policy makes up, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from policies.views import Routing


def routing_of_tokens(ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> Routing:
    """The routing that sends each token to its ``ids``; both are [tokens][k], by descending weight."""
    workload: dict[int, int] = {}
    for chosen in ids:
        for expert in chosen:
            workload[expert] = workload.get(expert, 0) + 1
    active = tuple(sorted(workload))
    return Routing(active, tuple(workload[expert] for expert in active), ids, weights)
