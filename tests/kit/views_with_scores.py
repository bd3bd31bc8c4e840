"""Layer views that know every token's scores, for policies that weigh tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from policies.mechanism.views import INFINITE_NS, ExpertCosts, LayerView, Phase, ResidencyView
from policies.parts.routers import routing_of_tokens
from tests.kit.views_for_tests import costs

COST = costs((5, 6, 7), (10, 20, 30), copy_ns=30)


def scored_view(
    scores: Sequence[Sequence[float]],
    k: int,
    *,
    resident: Collection[int] = (),
    staged: Collection[int] = (),
    loading: Mapping[int, int] | None = None,
    renormalised: bool = True,
    cost: ExpertCosts = COST,
    phase: Phase = "decode",
) -> LayerView:
    """Layer 0 of a model whose router takes the ``k`` best of ``scores`` [tokens][experts], ties to the lower id."""
    ids = [sorted(range(len(own)), key=lambda e, own=own: -own[e])[:k] for own in scores]  # type: ignore[misc]
    sums = [sum(own[e] for e in chosen) if renormalised else 1 for own, chosen in zip(scores, ids, strict=True)]
    weights = [[own[e] / total for e in chosen] for own, chosen, total in zip(scores, ids, sums, strict=True)]
    routing = routing_of_tokens(ids, weights)
    known = {**dict.fromkeys((*resident, *staged), 0), **(loading or {})}
    return LayerView(
        step=0,
        layer=0,
        phase=phase,
        routing=routing,
        scores=scores,
        sequences=tuple(range(len(ids))),
        ready_ns={e: known.get(e, INFINITE_NS) for e in routing.active},
        h2d_backlog_ns=0,
        cpu_backlog_ns=0,
        costs=(cost, cost),
        residency=ResidencyView([resident, ()], [staged, ()]),
    )
