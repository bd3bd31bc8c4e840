"""FlashMoE: a cache of the GPU, filled from an SSD, that evicts the expert which is expected to be used again last."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.calibration import Floats
from policies.mechanism.views import ExpertId, LayerView
from policies.parts.assigners import LoadAll
from policies.parts.caches import DemandCache
from policies.parts.host_level import NothingStays
from policies.parts.placements import NoPlacement
from policies.protocols import Composition, Needs
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count

FARTHEST = 0.75  # of the experts: so many tokens are the longest distance that is told apart (48 of 64 in the code)


class ReuseDistances:
    """Mean number of tokens until an expert's next use, by the tokens since its last and by how many of the last
    ``window`` used it: counted on ``ids`` [tokens, layers, k], of each layer alone.

    What was never seen has the mean of its recency. (Sums of whole numbers, so that no rounding decides.)
    """

    def __init__(self, ids: NDArray[np.int16], experts: int, window: int) -> None:
        self.window, self.farthest = window, max(int(FARTHEST * experts), 2)
        self._means = [self._counted(ids[:, layer], experts) for layer in range(ids.shape[1])]

    def of(self, layer: int, recency: int, uses: int) -> float:
        """Expected tokens until the next use, in units of one token."""
        return float(self._means[layer][min(recency, self.farthest), uses])

    def _counted(self, ids: NDArray[np.int16], experts: int) -> Floats:
        used = np.zeros((len(ids), experts), np.int64)
        np.put_along_axis(used, ids.astype(np.intp), 1, axis=1)
        totals = np.zeros((2, self.farthest + 1, self.window + 1), np.int64)  # distances, and how many
        recency, recent = np.full(experts, self.farthest), np.zeros(experts, np.int64)
        following = self._following(used)
        for token, now in enumerate(used):
            recent += now - (used[token - self.window] if token >= self.window else 0)
            recency = np.where(now, 1, np.minimum(recency + 1, self.farthest))
            np.add.at(totals[0], (recency, recent), following[token])
            np.add.at(totals[1], (recency, recent), 1)
        return _filled(*totals)

    def _following(self, used: NDArray[np.int64]) -> NDArray[np.int64]:
        """[tokens, experts]: tokens until the next use, at most the farthest."""
        following, ahead = np.zeros_like(used), np.full(used.shape[1], self.farthest)
        for token in range(len(used) - 1, -1, -1):
            following[token] = ahead
            ahead = np.where(used[token], 1, np.minimum(ahead + 1, self.farthest))
        return following


def _filled(distances: NDArray[np.int64], counts: NDArray[np.int64]) -> Floats:
    """Means; of cells that were never seen those of their row, and of such rows those of the last row before it."""
    rows = distances.sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
    for place in range(1, len(rows)):
        if not counts[place].any():
            rows[place] = rows[place - 1]
    return np.asarray(np.where(counts > 0, distances / np.maximum(counts, 1), rows[:, None]), np.float64)


class ReuseCache(DemandCache):
    """Evicts the member of the longest expected time until its next use; ties to the lower expert.

    A step counts as one token, whatever its batch.
    """

    def __init__(self, distances: ReuseDistances, layers: int, experts: int) -> None:
        self._distances = distances
        self._recency = [[distances.farthest] * experts for _ in range(layers)]
        self._uses: list[list[tuple[int, ...]]] = [[] for _ in range(layers)]  # of the last tokens, oldest first
        self._recent = [[0] * experts for _ in range(layers)]
        self._members: dict[int, set[ExpertId]] = {}

    def observe(self, view: LayerView) -> None:
        layer, active = view.layer, view.routing.active
        recency, recent, uses = self._recency[layer], self._recent[layer], self._uses[layer]
        for expert, last in enumerate(recency):
            recency[expert] = min(last + 1, self._distances.farthest)
        uses.append(active)
        for expert in active:
            recency[expert] = 1
            recent[expert] += 1
        if len(uses) > self._distances.window:
            for expert in uses.pop(0):
                recent[expert] -= 1

    def admitted(self, key: ExpertId, group: int) -> None:
        self._members.setdefault(group, set()).add(key)

    def evicted(self, key: ExpertId, group: int) -> None:
        self._members[group].remove(key)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        free = [key for key in self._members.get(group, ()) if key not in blocked]
        return min(free, key=self._rank, default=None)

    def _rank(self, key: ExpertId) -> tuple[float, ExpertId]:
        layer, expert = key
        return -self._distances.of(layer, self._recency[layer][expert], self._recent[layer][expert]), key


@register(
    "flashmoe",
    "slots on the GPU, filled from an SSD; the expert used again last leaves",
    source="FlashMoE (arXiv 2601.17063); ML_FlashMoE of malmong/CECAR f995f3b",
)
@dataclass(frozen=True)
class FlashMoe(Policy):
    """Each layer has so many slots on the GPU; what misses is read from the SSD and copied, and the host keeps nothing.
    The expert leaves whose next use is expected last, by its recency and frequency.

    window: tokens over which frequency is counted.
    demand_slots: staging slots for what a layer has no slot for (ours).

    Published: the two inputs, the target (the time until the next use, cut at three quarters of the experts), one cache
    a layer. Inferred: in place of a network of 64 hidden units, which reads all experts of a layer at once, the mean of
    the target for each pair of inputs, counted in the calibration's decode steps; and the window.
    """

    needs = Needs(calibration=True, calibrated_tokens=True, gpu_only=True)

    window: Count = 32
    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        ids = context.required_calibration().decode_ids
        distances = ReuseDistances(ids, context.experts, self.window)
        return Composition(
            placement=NoPlacement(), assigner=LoadAll(),
            cache=ReuseCache(distances, context.layers, context.experts),
            host_cache=NothingStays(), host_start=(), demand_slots=self.demand_slots, decision_cost="on-demand",
        )
