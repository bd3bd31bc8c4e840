"""SMoE's expert-cache router (Section IV-B, Algorithm 1): unimportant experts that are not on the GPU are replaced by
others of nearly the same score that are."""

from __future__ import annotations

from collections.abc import Container, Sequence

from policies.mechanism.views import INFINITE_NS, Commitment, Forecast, LayerView, Routing
from policies.parts.routers import combine_weights, routing_of_tokens


class CacheRouter:
    """Exchanges low-score experts that miss. With S the (k+1)-th highest score of a token (the highest not selected):

    - its *top-score* experts are those selected with a score above (1 + ``alpha``) S: they always stay;
    - its *low-score* experts are the other selected ones: they stay if they are on the GPU, in flight, or
      top-score for any token of the batch, since then they are computed anyway;
    - a low-score expert that misses is exchanged for the best one not selected with a score above (1 - ``alpha``) S
      that is on the GPU, or top-score for any token. Where such substitutes run out, the lowest-scored of those that
      miss are exchanged, and the highest-scored stay, to be loaded or computed on the CPU.

    Our readings, where listing and text differ or leave it open: a first pass over all tokens finds the top-score
    experts, a second one exchanges; a score at the bound is low; each token keeps k experts (the listing's ``L <=
    score`` lets a (k+1)-th in). A token that exchanges weighs its experts by their scores, which sum up to 1 where the
    model makes them (``norm_topk``).

    ``listing``: two things as printed. One pass, so that a token sees the top-score experts of the tokens before it
    only; and all low-score experts are exchanged as far as there are substitutes, those on the GPU too.
    """

    looks_ahead = False

    def __init__(self, alpha: float, listing: bool = False, norm_topk: bool = True) -> None:
        self.alpha = alpha
        self.listing = listing
        self.norm_topk = norm_topk

    def route(self, view: LayerView) -> Routing:
        """The routing in force; ``view.routing`` itself if nothing is exchanged. Needs scores and tokens."""
        routing, scores = view.routing, view.scores
        assert scores is not None
        available = {expert for expert, ns in view.ready_ns.items() if ns != INFINITE_NS}
        available.update(view.residency.resident[view.layer], view.residency.staged[view.layer])
        if not self.listing and len(available.intersection(routing.active)) == len(routing.active):
            return routing
        others = [_without(ids, own) for ids, own in zip(routing.token_ids, scores, strict=True)]
        chosen = self._choose(routing.token_ids, scores, others, available)
        if all(new is old for new, old in zip(chosen, routing.token_ids, strict=True)):
            return routing
        tokens = zip(routing.token_ids, routing.token_weights, chosen, scores, strict=True)
        weights = [kept if new is old else combine_weights(own, new, self.norm_topk) for old, kept, new, own in tokens]
        return routing_of_tokens(chosen, weights)

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        """None: no layer is routed ahead."""
        return None

    def _choose(
        self, token_ids: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], others: Sequence[Sequence[float]],
        available: set[int],
    ) -> list[Sequence[int]]:
        """The experts of each token; ``available`` grows by the top-score experts."""
        tops = []
        for ids, own, rest in zip(token_ids, scores, others, strict=True):
            bound = (1 + self.alpha) * max(rest)
            tops.append([expert for expert in ids if own[expert] > bound])
        if not self.listing:
            available.update(*tops)
        chosen = []
        for ids, rest, top in zip(token_ids, others, tops, strict=True):
            available.update(top)
            chosen.append(self._exchange(ids, rest, top, available))
        return chosen

    def _exchange(
        self, ids: Sequence[int], rest: Sequence[float], top: Sequence[int], available: Container[int]
    ) -> Sequence[int]:
        """One token's experts by descending score; ``ids`` itself if they stay."""
        leaving = [e for e in ids if e not in top and (self.listing or e not in available)]
        if not leaving:
            return ids
        floor = (1 - self.alpha) * max(rest)
        spare = [e for e, score in enumerate(rest) if score > floor and e in available]
        spare = sorted(spare, key=rest.__getitem__, reverse=True)[: len(leaving)]
        if not spare:
            return ids
        gone = leaving[len(leaving) - len(spare) :]
        return [e for e in ids if e not in gone] + spare


def _without(ids: Sequence[int], own: Sequence[float]) -> Sequence[float]:
    """The scores of the experts that are not selected, by expert; 0 for the others."""
    rest = list(own)
    for expert in ids:
        rest[expert] = 0.0
    return rest
