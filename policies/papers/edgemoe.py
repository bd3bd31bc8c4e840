"""EdgeMoE: statistical prefetching, and a cache by frequency that favours the earlier layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from policies.calibration import Counts, Floats
from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.parts.assigners import LoadAll
from policies.parts.caches import RankedCache
from policies.parts.placements import NoPlacement, Pooled, PoolPlacement, PopularityPlacement
from policies.protocols import Composition, Needs, Placement
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count, Share


def decayed_counts(activations: Counts) -> Floats:
    """[layers, experts]: tokens of the past sequences ``activations`` [sequences, layers, experts], those of a sequence
    halved at the start of each later one, and of the one that begins now."""
    ages = np.arange(len(activations), 0, -1)
    return np.tensordot(0.5**ages, activations, axes=1)


def layer_weights(layers: int, favour: float) -> Floats:
    """[layers]: 1 in the first, falling evenly, by ``favour`` over a whole pass: 0 all alike, 1 as layers - layer."""
    return np.asarray(1 - favour * np.arange(layers) / layers)


class LayerWeightedLfuCache(RankedCache):
    """Evicts the least of frequency x weight of the layer: of two experts of equal frequency the one in the earlier
    layer stays, since every pass needs it sooner. Frequencies are tokens, and start at ``counts`` [layers, experts];
    ``weights`` [layers] fall. Ties go to the lower id."""

    def __init__(self, counts: Floats, weights: Floats) -> None:
        super().__init__()
        self._weights: list[float] = weights.tolist()
        self._ranks: list[list[float]] = (counts * weights[:, None]).tolist()

    def observe(self, view: LayerView) -> None:
        """Count the tokens of every active expert."""
        layer, ranks, weight = view.layer, self._ranks[view.layer], self._weights[view.layer]
        for expert, tokens in zip(view.routing.active, view.routing.tokens, strict=True):
            ranks[expert] += tokens * weight
            self.rerank((layer, expert))

    def rank_of(self, key: ExpertId) -> float:
        """Weighted frequency, counted outside of the cache too."""
        return self._ranks[key.layer][key.expert]


class StatisticalPrefetcher:
    """The next layer's ``size`` experts of highest ``frequency`` [layers, experts], whatever the present tokens are.

    ``among`` "all": those of them that are absent; "absent": the most frequent of the absent ones. The
    ``size`` most frequent are not displaced meanwhile.
    """

    into: Literal["cache", "staging"] = "cache"

    def __init__(self, frequency: Floats, size: int, among: Literal["all", "absent"] = "all") -> None:
        self.size = size
        self._among_all = among == "all"
        by_frequency = np.argsort(-frequency, axis=1, kind="stable").tolist()
        self._ranked = [[ExpertId(layer, e) for e in row] for layer, row in enumerate(by_frequency)]
        self._predicted = [frozenset(row[:size]) for row in self._ranked]

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Absent experts of the next layer, the most frequent first."""
        layer = view.layer + 1
        there = view.residency.resident[layer]
        ranked = self._ranked[layer][: self.size] if self._among_all else self._ranked[layer]
        return [key for key in ranked if key.expert not in there][: self.size]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """The predicted experts."""
        return self._predicted[view.layer + 1]


@register(
    "edgemoe",
    "prefetches the popular; LFU favours earlier layers",
    source="EdgeMoE (arXiv 2308.14352), as read in docs/readings.md#edgemoe",
)
@dataclass(frozen=True)
class EdgeMoe(Policy):
    """EdgeMoE, as read in docs/readings.md.

    prefetch: experts of the next layer that are predicted, 0 for none. None: the model's top-k.
    among: "all" predicts the most frequent experts and copies the absent ones of them; "absent" copies as many of the
        most frequent absent ones (DALI's reading of its own prefetch, Section 4.2).
    pool: one cache over all layers, which is what makes the weight of a layer matter; False: slots by layer (ours).
    favour: by what share the weight of a layer falls over a whole pass (ours; all that is said is that earlier layers
        come first). 1 is the strong reading, layers - layer, with which the last layers' experts are evicted whatever
        their frequency; 0 gives all layers the same weight.
    start: which experts are in the cache at first: the best "ranked" by calibrated frequency and layer, or none,
        "empty" (ours).
    demand_slots: staging slots for loads of an event that is larger than the cache (ours).

    A run plays one batch of sequences. Counts are halved per sequence: those of the calibration's sequences one after
    the other and then once more, as the run begins; they are not halved within it. Expert-wise bit-widths are not
    modelled: all experts of a layer have one size.
    """

    needs = Needs(calibration=True, gpu_only=True)

    prefetch: NonNegative | None = None
    among: Literal["all", "absent"] = "all"
    pool: bool = True
    favour: Share = 0.1
    start: Literal["ranked", "empty"] = "ranked"
    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        """Calibrated frequencies predict and evict."""
        calibration = context.required_calibration()
        size = context.top_k if self.prefetch is None else self.prefetch
        counts, weights = decayed_counts(calibration.activations), layer_weights(context.layers, self.favour)
        return Composition(
            placement=self._placement(counts * weights[:, None]),
            assigner=LoadAll(),
            prefetcher=StatisticalPrefetcher(calibration.popularity, size, self.among) if size else None,
            cache=LayerWeightedLfuCache(counts, weights),
            demand_slots=self.demand_slots,
            parameters={"prefetch": size},
        )

    def _placement(self, ranks: Floats) -> Placement:
        if self.start == "empty":
            return PoolPlacement() if self.pool else NoPlacement()
        if self.pool:
            return Pooled(PopularityPlacement(popularity=ranks))
        return PopularityPlacement(uniform=True, popularity=ranks)
