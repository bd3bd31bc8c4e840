"""MRS, HybriMoE's score-aware cache ("Minus Recent Score", Section IV-D, Eq. 3)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Literal

import numpy as np

from policies.caches import DemandCache
from policies.views import ExpertId, LayerView, PolicyError


class MrsCache(DemandCache):
    """Evicts the member of least S, where each routing of a layer makes S = ``alpha`` TopP(s) + (1 - ``alpha``) S.

    ``keep``: TopP keeps the so many largest router probabilities of a token and sets the others to 0 (2K in the paper;
    equal ones: the lower id), so experts outside it decay. ``alpha`` is unpublished. S starts at 0, or at ``prior``
    ([layers][experts], ours); ties go to the lower id. Many tokens are the mean of their TopP (our reading); ``tokens``
    "first" looks at the first one alone, as the released code does. Members come in by demand loads and prefetches, not
    by being computed on the CPU (our reading). Whether layers share one pool is the placement's business: S is kept by
    layer, and compared as it is. The views must have scores.
    """

    def __init__(
        self, layers: int, experts: int, keep: int, alpha: float = 0.3, tokens: Literal["mean", "first"] = "mean",
        prior: Sequence[Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        self.keep = keep
        self.alpha = alpha
        self.tokens = tokens
        self._scores = [list(row) for row in prior] if prior is not None else [[0.0] * experts for _ in range(layers)]
        self._members: list[set[int]] = [set() for _ in range(layers)]
        self._orders: list[list[int] | None] = [None] * layers  # members by S; None: to be sorted again
        self._layers: dict[int, set[int]] = {}  # that share a group's slots

    def scores(self, layer: int) -> Sequence[float]:
        """S of every expert of a layer."""
        return self._scores[layer]

    def observe(self, view: LayerView) -> None:
        """Eq. 3 with the scores of the layer that was routed."""
        if view.scores is None:
            raise PolicyError(
                f"MRS, step {view.step}, layer {view.layer}: expected router scores of all experts, the view has none: "
                f"declare Needs(scores=True), and give a trace that holds them"
            )
        rows = np.asarray(view.scores if self.tokens == "mean" else view.scores[:1], np.float64)
        recent = self.alpha * top(rows, self.keep).mean(axis=0)
        fade = 1 - self.alpha
        self._scores[view.layer] = [
            new + fade * old for new, old in zip(recent.tolist(), self._scores[view.layer], strict=True)
        ]
        self._orders[view.layer] = None

    def admitted(self, id: ExpertId, group: int) -> None:
        """A member, with the S that it has."""
        layer, expert = id
        self._layers.setdefault(group, set()).add(layer)
        self._members[layer].add(expert)
        order, scores = self._orders[layer], self._scores[layer]
        if order is not None:
            insort(order, expert, key=lambda other: (scores[other], other))

    def evicted(self, id: ExpertId, group: int) -> None:
        """A member no more; its S goes on."""
        layer, expert = id
        self._members[layer].remove(expert)
        order = self._orders[layer]
        if order is not None:
            order.remove(expert)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member of least S that is not blocked."""
        heads = [
            (self._scores[layer][order[0]], layer, 0)
            for layer in self._layers.get(group, ())
            if (order := self._lowest_first(layer))
        ]
        heapify(heads)
        while heads:
            _, layer, place = heads[0]
            order = self._lowest_first(layer)
            id = ExpertId(layer, order[place])
            if id not in blocked:
                return id
            place += 1
            if place < len(order):
                heapreplace(heads, (self._scores[layer][order[place]], layer, place))
            else:
                heappop(heads)
        return None

    def _lowest_first(self, layer: int) -> list[int]:
        """A layer's members by S."""
        order = self._orders[layer]
        if order is None:
            order = sorted(sorted(self._members[layer]), key=self._scores[layer].__getitem__)
            self._orders[layer] = order
        return order


def top(rows: np.ndarray, keep: int) -> np.ndarray:
    """TopP of each row ([tokens, experts]): its ``keep`` largest entries, the others 0; ties go to the lower column."""
    if keep >= rows.shape[1]:
        return rows
    best = np.argsort(-rows, axis=1, kind="stable")[:, :keep]
    kept = np.zeros_like(rows)
    np.put_along_axis(kept, best, np.take_along_axis(rows, best, axis=1), axis=1)
    return kept
