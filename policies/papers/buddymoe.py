"""BuddyMoE: a similar expert on the GPU in the place of one that misses (arXiv 2511.10054)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from policies.mechanism.views import INFINITE_NS, LayerView, Routing
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache
from policies.parts.placements import random_or_popular
from policies.parts.prefetchers import TopPrefetcher
from policies.parts.routers import TrueRouter, routing_of_tokens
from policies.protocols import Composition, Needs
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count, Share

Buddies = Sequence[Sequence[Sequence[int]]]  # by layer and expert, the most similar first


def buddies_of(ids: NDArray[np.int16], experts: int, most: int) -> Buddies:
    """For each expert, up to ``most`` others that most tokens of ``ids`` [tokens, layers, k] use together with it, ties
    to the lower id; none that no token does."""
    table = []
    for layer in range(ids.shape[1]):
        used = np.zeros((len(ids), experts), np.float32)  # exact below 2^24 tokens
        np.put_along_axis(used, ids[:, layer].astype(np.intp), 1, axis=1)
        together = (used.T @ used).astype(np.int64)
        np.fill_diagonal(together, 0)
        order = np.argsort(-together, axis=1, kind="stable")[:, :most]
        table.append([[e for e in row if counts[e]] for row, counts in zip(order.tolist(), together, strict=True)])
    return table


class BuddyRouter(TrueRouter):
    """In decode, each expert of a token that is neither on the GPU nor on its way there gives its place, with its
    weight, to the first of its ``buddies`` that is there and that the token does not have.

    Only for tokens that spread their weight: those whose entropy over their k weights, as a share of log k, is at least
    ``entropy``. A token's ``keep`` best experts always stay.
    """

    def __init__(self, buddies: Buddies, entropy: float, keep: int) -> None:
        self.buddies, self.entropy, self.keep = buddies, entropy, keep

    def route(self, view: LayerView) -> Routing:
        """The routing in force; ``view.routing`` itself if nothing changes. Needs tokens."""
        routing, layer = view.routing, view.layer
        on_gpu = {*view.residency.resident[layer], *view.residency.staged[layer]}
        on_gpu.update(expert for expert, ready in view.ready_ns.items() if ready != INFINITE_NS)
        if view.phase != "decode" or on_gpu.issuperset(routing.active):
            return routing
        tokens = zip(routing.token_ids, routing.token_weights, strict=True)
        ids = [self._exchange(layer, own, on_gpu) if self._tolerant(weights) else own for own, weights in tokens]
        if all(new is old for new, old in zip(ids, routing.token_ids, strict=True)):
            return routing
        return routing_of_tokens(ids, routing.token_weights)

    def _exchange(self, layer: int, own: Sequence[int], on_gpu: Container[int]) -> Sequence[int]:
        """One token's experts, each in its place; ``own`` itself if they stay."""
        chosen = list(own)
        for place in range(self.keep, len(own)):
            if own[place] in on_gpu:
                continue
            spare = (other for other in self.buddies[layer][own[place]] if other in on_gpu and other not in chosen)
            chosen[place] = next(spare, own[place])
        return own if chosen == list(own) else chosen

    def _tolerant(self, weights: Sequence[float]) -> bool:
        """True if a token spreads its weight."""
        if len(weights) < 2 or not self.entropy:
            return True
        total = sum(weights)
        shares = [weight / total for weight in weights if weight > 0]
        return -sum(share * log(share) for share in shares) >= self.entropy * log(len(weights))


@register(
    "buddy",
    "a similar expert on the GPU in place of one that misses",
    source="BuddyMoE (arXiv 2511.10054)",
)
@dataclass(frozen=True)
class Buddy(Policy):
    """Similarity is co-activation on calibration prompts: how many decode tokens use both experts. (The paper also
    compares outputs, which no trace holds, and has a gate for batches in which most experts miss.)

    buddies: how many similar experts are looked at (ours; the paper takes them up to a share of co-activations).
    entropy: the least entropy of a token's weights, as a share of the greatest, at which it exchanges experts; 0: all
        tokens (ours; the paper's threshold is not known here).
    keep: experts of a token that always stay, the best (ours).
    prefetch: absent experts of the next layer that its gate forecasts, copied to the cache. None: top-k of the model.
    start: experts in the slots at first, "random" or each layer's most "popular".
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    buddies: Count = 16
    entropy: Share = 0.0
    keep: NonNegative = 1
    prefetch: NonNegative | None = None
    start: Literal["random", "popular"] = "random"
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        forecasts = () if self.prefetch == 0 else (("gate", 1),)
        return Needs(tokens=True, forecasts=forecasts, calibration=True, gpu_only=True, changes_routing=True)

    def compose(self, context: BuildContext) -> Composition:
        """A router, prefetches by the next gate into an LRU, and loads."""
        table = buddies_of(context.required_calibration().decode_ids, context.experts, self.buddies)
        size = context.top_k if self.prefetch is None else self.prefetch
        return Composition(
            placement=random_or_popular(self.start, context.seed),
            router=BuddyRouter(table, self.entropy, self.keep),
            assigner=LoadAll(),
            prefetcher=TopPrefetcher(size, "gate", "cache") if size else None,
            cache=LruCache(),
            demand_slots=self.demand_slots,
            parameters={"prefetch": size},
        )
