"""MRS, HybriMoE's score-aware cache ("Minus Recent Score", Section IV-D, Eq. 3)."""

from __future__ import annotations

from collections.abc import Container, Sequence
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
        self._lowest_first: list[list[int] | None] = [None] * layers  # members by S; None: to be sorted again
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
        self._lowest_first[view.layer] = None

    def admitted(self, id: ExpertId, group: int) -> None:
        """A member, with the S that it has."""
        self._layers.setdefault(group, set()).add(id.layer)
        self._members[id.layer].add(id.expert)
        self._lowest_first[id.layer] = None

    def evicted(self, id: ExpertId, group: int) -> None:
        """A member no more; its S goes on."""
        self._members[id.layer].remove(id.expert)
        self._lowest_first[id.layer] = None

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member of least S that is not blocked."""
        lowest = [self._lowest(layer, blocked) for layer in self._layers.get(group, ())]
        found = [entry for entry in lowest if entry is not None]
        return min(found)[1] if found else None

    def _lowest(self, layer: int, blocked: Container[ExpertId]) -> tuple[float, ExpertId] | None:
        """(S, id) of the member of one layer with the least S that is not blocked."""
        scores, order = self._scores[layer], self._lowest_first[layer]
        if order is None:
            order = self._lowest_first[layer] = sorted(sorted(self._members[layer]), key=scores.__getitem__)
        for expert in order:
            id = ExpertId(layer, expert)
            if id not in blocked:
                return scores[expert], id
        return None


def top(rows: np.ndarray, keep: int) -> np.ndarray:
    """TopP of each row ([tokens, experts]): its ``keep`` largest entries, the others 0; ties go to the lower column."""
    if keep >= rows.shape[1]:
        return rows
    best = np.argsort(-rows, axis=1, kind="stable")[:, :keep]
    kept = np.zeros_like(rows)
    np.put_along_axis(kept, best, np.take_along_axis(rows, best, axis=1), axis=1)
    return kept
