"""MRS, HybriMoE's score-aware cache ("Minus Recent Score", Section IV-D, Eq. 3)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Sequence
from itertools import filterfalse, islice, repeat
from typing import Literal, TypeAlias

import numpy as np

from policies.mechanism.score_rows import ScoreRows, mean_top
from policies.mechanism.views import ExpertId, LayerView, Phase, PolicyError, Swap
from policies.parts.caches import DemandCache
from policies.protocols import When

_Ranked: TypeAlias = tuple[float, int, int]  # S, layer, expert: the least is evicted first


class MrsCache(DemandCache):
    """Evicts the member of least S, where each routing of a layer makes S = ``alpha`` TopP(s) + (1 - ``alpha``) S.

    ``keep``: TopP keeps this many largest router probabilities of a token and sets the others to 0 (2K in the paper;
    equal ones: the lower id), so experts outside it decay. ``alpha`` is unpublished. S starts at 0, or at ``prior``
    ([layers][experts], ours); ties go to the lower id. Many tokens are the mean of their TopP (our reading); ``tokens``
    "first" uses the first one alone, as the released code does. Members are admitted by demand loads and prefetches,
    not by being computed on the CPU (our reading). ``background``: at the end of each layer of a step of this phase its
    absent expert of largest S is copied into the slot of its resident of least S, if that is less. ``by_score``: a load
    is admitted only if its S is not less than that of the member that would leave. Whether layers share one pool is the
    placement's business: S is kept by layer, and compared as it is. ``reached_first`` (ours): in a prefill step members
    of the layers reached leave before those of layers to come, which use nearly all of their experts in the same step.
    The views must have scores.
    """

    def __init__(
        self, layers: int, experts: int, keep: int, alpha: float, tokens: Literal["mean", "first"] = "mean",
        prior: Sequence[Sequence[float]] | None = None, *, background: Phase | None = None, by_score: bool = False,
        reached_first: bool = False,
    ) -> None:
        self.background, self.by_score, self.reached_first = background, by_score, reached_first
        self.keep = keep
        self.alpha = alpha
        self.tokens = tokens
        self._scores = np.zeros((layers, experts)) if prior is None else np.array(prior, np.float64)
        self._absent = np.full((layers, experts), np.inf)  # 0 for members
        self._orders: list[list[int] | None] = [None] * layers  # members by S; None: to be sorted again
        self._known: list[list[float]] = [[] for _ in range(layers)]  # S of every expert, by which they were sorted
        self._layers: dict[int, set[int]] = {}  # that share a group's slots
        self._head: list[_Ranked | None] = [None] * layers  # the member to evict first
        self._heads: dict[int, list[_Ranked]] = {}  # of each group's layers, ascending
        self._stale: set[int] = set()  # layers whose head must be found again
        self._reached: int | None = None  # the layer at work, in a prefill step

    def scores(self, layer: int) -> Sequence[float]:
        """S of every expert of a layer."""
        scores: list[float] = self._scores[layer].tolist()
        return scores

    def observe(self, view: LayerView) -> None:
        """Eq. 3 with the scores of the layer that was routed."""
        if view.scores is None:
            raise PolicyError(
                f"MRS, step {view.step}, layer {view.layer}: expected router scores of all experts, the view has none: "
                f"declare Needs(scores=True), and give a trace that holds them"
            )
        rows = view.scores if self.tokens == "mean" else view.scores[:1]
        if isinstance(rows, ScoreRows):
            gained = rows.mean_top(self.keep)
        else:
            gained = mean_top(np.asarray(rows, np.float64), self.keep)
        scores = self._scores[view.layer]
        scores *= 1 - self.alpha
        scores += self.alpha * gained
        self._orders[view.layer] = None
        self._stale.add(view.layer)
        self._reached = view.layer if view.phase == "prefill" else None

    def admitted(self, key: ExpertId, group: int) -> None:
        """A member, with its present S."""
        layer, expert = key
        self._layers.setdefault(group, set()).add(layer)
        self._absent[layer, expert] = 0.0
        order = self._orders[layer]
        if order is not None:
            order.insert(_place(expert, order, self._known[layer]), expert)
        head = self._head[layer]
        if head is None or (self._scores.item(layer, expert), layer, expert) < head:
            self._stale.add(layer)

    def evicted(self, key: ExpertId, group: int) -> None:
        """No longer a member; its S is kept up to date."""
        layer, expert = key
        self._absent[layer, expert] = np.inf
        head = self._head[layer]
        if head is None or head[2] == expert:
            self._stale.add(layer)
        order = self._orders[layer]
        if order is not None:
            order.remove(expert)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member of least S that is not blocked."""
        heads, least = self._heads_of(group), None
        if self.reached_first and self._reached is not None:
            least = self._least([head for head in heads if head[1] <= self._reached], blocked)
        if least is None:
            least = self._least(heads, blocked)
        if least is None or (self.by_score and self._scores.item(incoming) < least[0]):
            return None
        return ExpertId(*least[1:])

    def advantages(self, layer: int, experts: Sequence[int], group: int) -> list[float | None]:
        """The share of its own S by which each expert exceeds the least member of a whole ``group``; None: no S yet."""
        heads, scores = self._heads_of(group), self._scores[layer]
        least = heads[0][0] if heads else 0.0
        return [max(1 - least / score, 0.0) if score > 0 else None for score in map(scores.item, experts)]

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        """At the end of a layer of a step of that phase, the best absent expert for the worst resident."""
        layer, resident = view.layer, view.residency.resident[view.layer]
        if view.phase != self.background or when != "layer_end" or not resident:
            return ()
        scores = self.scores(layer)
        absent = np.flatnonzero(self._absent[layer]).tolist()
        if not absent:
            return ()
        best, worst = max(absent, key=scores.__getitem__), min(sorted(resident), key=scores.__getitem__)
        return [Swap(ExpertId(layer, best), ExpertId(layer, worst))] if scores[best] > scores[worst] else ()

    def _least(self, heads: Sequence[_Ranked], blocked: Container[ExpertId]) -> _Ranked | None:
        """The member of least S that is not blocked, of the layers of ``heads``."""
        least = next((head for head in heads if head[1:] not in blocked), None)
        for head in heads:  # of a layer whose first member is blocked, another one may be less
            if least is not None and head >= least:
                break
            free = self._first_free(head[1], blocked, least)
            if free is not None and (least is None or free < least):
                least = free
        return least

    def _first_free(self, layer: int, blocked: Container[ExpertId], below: _Ranked | None) -> _Ranked | None:
        """The layer's member of least S that is not blocked, if its S is not above that of ``below``."""
        order, known = self._lowest_first(layer), self._known[layer]
        last = len(order) if below is None else bisect_right(order, below[0], key=known.__getitem__)
        members = zip(repeat(layer), islice(order, last))
        free = next(filterfalse(blocked.__contains__, members), None)  # no loop: all of a large layer may be pinned
        return None if free is None else (known[free[1]], *free)

    def _heads_of(self, group: int) -> list[_Ranked]:
        """The first of each layer's members, of the layers that have any, ascending. A layer stays in its group."""
        heads = self._heads.setdefault(group, [])
        stale = self._stale & self._layers.get(group, set())
        self._stale -= stale
        for layer in stale:
            old, new = self._head[layer], self._first(layer)
            if old is not None:
                del heads[bisect_left(heads, old)]
            if new is not None:
                insort(heads, new)
            self._head[layer] = new
        return heads

    def _first(self, layer: int) -> _Ranked | None:
        """A layer's member of least S."""
        scores = self._scores[layer]
        if self._orders[layer] is None and self._reached is None:  # few more will be asked for: not worth sorting all
            least = scores + self._absent[layer]
            expert = int(least.argmin())
            score: float = least.item(expert)
            return (score, layer, expert) if score < np.inf else None
        order = self._lowest_first(layer)
        return (scores.item(order[0]), layer, order[0]) if order else None

    def _lowest_first(self, layer: int) -> list[int]:
        """A layer's members by S."""
        order = self._orders[layer]
        if order is None:
            known = self._known[layer] = self._scores[layer].tolist()
            members = np.flatnonzero(self._absent[layer] == 0).tolist()
            order = self._orders[layer] = sorted(members, key=known.__getitem__)
        return order


def _place(expert: int, order: Sequence[int], scores: Sequence[float]) -> int:
    """Place of an expert among others that are sorted by score and number."""
    score, score_of = scores[expert], scores.__getitem__
    first, last = (bisect(order, score, key=score_of) for bisect in (bisect_left, bisect_right))
    return bisect_left(order, expert, first, last)
