"""Cache-prior routing: experts on the GPU get a bonus before the router's choice of k (arXiv 2412.00099)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import log
from typing import Annotated, Literal

from policies.mechanism.views import LayerView, Routing
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache
from policies.parts.placements import random_or_popular
from policies.parts.routers import TrueRouter, combine_weights, routing_of_tokens
from policies.protocols import Composition, Needs
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count, at_least

Unit = Literal["range", "probability"]
LEAST_SCORE = 2.0**-24  # of half precision, in which traces hold scores: log 0 is that of this


class CachePriorRouter(TrueRouter):
    """In decode, a token's k experts are those of the best ranks, where the rank of an expert in a slot has a
    ``bonus``; its ``keep`` best by score always stay. Weights are those of the scores, without the bonus.

    ``unit`` "range": ranks are logits, and the bonus is a share of the mean range of a token's logits, highest less
    lowest, of the tokens so far in this layer; "probability": ranks are scores.
    """

    def __init__(self, bonus: float, unit: Unit = "range", keep: int = 1, norm_topk: bool = True) -> None:
        self.bonus, self.unit, self.keep, self.norm_topk = bonus, unit, keep, norm_topk
        self._ranges: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # by layer: sum, tokens

    def route(self, view: LayerView) -> Routing:
        """The routing in force; ``view.routing`` itself if nothing changes. Needs scores and tokens."""
        routing, scores = view.routing, view.scores
        if view.phase != "decode":
            return routing
        assert scores is not None
        on_gpu = {*view.residency.resident[view.layer], *view.residency.staged[view.layer]}
        bonus = self.bonus * (self._range(view) if self.unit == "range" else 1.0)
        tokens = list(zip(routing.token_ids, routing.token_weights, scores, strict=True))
        ids = [self._choose(own, row, on_gpu, bonus) for own, _, row in tokens]
        changed = [set(new) != set(own) for new, (own, _, _) in zip(ids, tokens, strict=True)]
        if not any(changed):
            return routing
        picked = [new if differs else own for new, differs, (own, _, _) in zip(ids, changed, tokens, strict=True)]
        weights = [
            combine_weights(row, new, self.norm_topk) if differs else kept
            for new, differs, (_, kept, row) in zip(picked, changed, tokens, strict=True)
        ]
        return routing_of_tokens(picked, weights)

    def _range(self, view: LayerView) -> float:
        """The mean range of logits, with the tokens of this view."""
        mean = self._ranges[view.layer]
        for row in view.scores or ():
            mean[0] += log(max(max(row), LEAST_SCORE)) - log(max(min(row), LEAST_SCORE))
            mean[1] += 1
        return mean[0] / mean[1]

    def _choose(self, own: Sequence[int], row: Sequence[float], on_gpu: Container[int], bonus: float) -> list[int]:
        """One token's experts by descending score."""
        value = [log(max(score, LEAST_SCORE)) for score in row] if self.unit == "range" else row
        kept = own[: self.keep]
        others = [expert for expert in range(len(row)) if expert not in kept]
        others.sort(key=lambda expert: -value[expert] - (bonus if expert in on_gpu else 0.0))
        return sorted([*kept, *others[: len(own) - len(kept)]], key=lambda expert: (-row[expert], expert))


@register(
    "cache-prior",
    "a bonus for experts on the GPU before the router chooses",
    source="Mixture of Cache-Conditional Experts (arXiv 2412.00099); everett6/moe-prefetch, patches/0007",
)
@dataclass(frozen=True)
class CachePrior(Policy):
    """Cache-prior routing over an LRU of every layer; what misses is copied.

    bonus: in units of ``unit``. 0.2 is ours: the paper shows curves. everett6 measured 0.02 in "probability".
    unit: "range" of the logits (the paper), or "probability" (everett6).
    keep: experts of a token that always stay, the best (the paper: the choice of the first is what quality needs).
    start: experts in the slots at first, "random" or each layer's most "popular" (silent).
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    bonus: Annotated[float, at_least(0)] = 0.2
    unit: Unit = "range"
    keep: NonNegative = 1
    start: Literal["random", "popular"] = "random"
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        return Needs(
            scores=True, tokens=True, changes_routing=True, gpu_only=True, calibration=self.start == "popular"
        )

    def compose(self, context: BuildContext) -> Composition:
        """A router, an LRU, and loads."""
        return Composition(
            placement=random_or_popular(self.start, context.seed),
            router=CachePriorRouter(self.bonus, self.unit, self.keep, context.norm_topk),
            assigner=LoadAll(),
            cache=LruCache(),
            demand_slots=self.demand_slots,
        )
