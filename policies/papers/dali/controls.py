"""Policies that DALI is compared with: the static threshold of its Section 6.1, and random prefetches (Fig. 16a)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.papers.dali.parts import GreedyAssigner
from policies.papers.dali.system import default_sizes
from policies.papers.hybrimoe.mrs import MrsCache
from policies.parts.assigners import ThresholdAssigner, break_even
from policies.parts.caches import StaticCache
from policies.parts.placements import PopularityPlacement, RandomPlacement
from policies.parts.prefetchers import NoProtection, TopPrefetcher
from policies.protocols import Composition, Needs
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count, Share


@register(
    "static-threshold",
    "busy experts on the GPU; next-gate prefetching; MRS",
    source="DALI, Section 6.1 (its description of HybriMoE); HybriMoE, Section IV-D for the cache",
)
@dataclass(frozen=True)
class StaticThreshold(Policy):
    """The workload alone decides on GPU or CPU. DALI names the parts, and no number.

    theta: the threshold, in tokens. None: each layer's break-even by the planner's costs (ours).
    residents: "stay" applies the threshold to absent experts only (which the baseline's row is about); "split" sends
        residents of small workload to the CPU as well.
    uniform: even slots in every layer, instead of the most popular experts of the whole model as in Fiddler.
    prefetch: how many experts of the next layer to copy. None: as many as DALI, 1 below 32 experts and 4 from there.
    alpha, keep: of the MRS cache; keep None: twice the model's top-k.
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    theta: NonNegative | None = None
    residents: Literal["stay", "split"] = "stay"
    uniform: bool = False
    prefetch: NonNegative | None = None
    alpha: Share = 0.3
    keep: Count | None = None
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        """A forecast, unless nothing is prefetched."""
        return Needs(scores=True, forecasts=() if self.prefetch == 0 else (("gate", 1),), calibration=True)

    def compose(self, context: BuildContext) -> Composition:
        """Popular experts at first, MRS from then on."""
        prefetch = default_sizes(context).prefetch if self.prefetch is None else self.prefetch
        keep = self.keep or 2 * context.top_k
        return Composition(
            placement=PopularityPlacement(self.uniform),
            assigner=ThresholdAssigner(self.theta, self.residents),
            prefetcher=TopPrefetcher(prefetch, "gate", "cache") if prefetch else None,
            cache=MrsCache(context.layers, context.experts, keep, self.alpha),
            demand_slots=self.demand_slots,
            parameters={"theta": self._resolved(context), "prefetch": prefetch, "keep": keep},
        )

    def _resolved(self, context: BuildContext) -> object:
        """The threshold, by layer where layers differ; None if neither it nor the planner's costs are given."""
        if self.theta is not None or not context.costs:
            return self.theta
        by_layer = [break_even(costs) for costs in context.costs]
        return by_layer[0] if len(set(by_layer)) == 1 else by_layer


class RandomPrefetcher(NoProtection):
    """``size`` experts of the next layer, drawn uniformly among those not on the GPU; no forecast is made."""

    into: Literal["cache", "staging"] = "staging"

    def __init__(self, experts: int, size: int, seed: int) -> None:
        self.experts, self.size = experts, size
        self._draw = random.Random(seed)

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Draw among the absent experts, without replacement."""
        layer = view.layer + 1
        resident, staged = view.residency.resident[layer], view.residency.staged[layer]
        absent = [expert for expert in range(self.experts) if expert not in resident and expert not in staged]
        chosen = self._draw.sample(absent, min(self.size, len(absent)))
        return [ExpertId(layer, expert) for expert in chosen]


@register(
    "random-prefetch",
    "DALI's assignment, random prefetches, static cache",
    source='DALI, Section 6.3, Fig. 16a ("Random")',
)
@dataclass(frozen=True)
class RandomPrefetch(Policy):
    """DALI's control for its prefetcher: greedy assignment with experts prefetched at random.

    prefetch: P. None: DALI's for the model (Fig. 12), 1 for Mixtral and the like, else 4; Fig. 16a itself has 2.
    prefetch_slots: staging slots for prefetches. None: 2 P, as DALI's (ours).
    demand_slots: staging slots for loads (ours).
    """

    prefetch: Count | None = None
    prefetch_slots: Count | None = None
    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        """DALI's residents at random, which stay (the figure has no cache updates), its assignment, and no forecast."""
        size = default_sizes(context).prefetch if self.prefetch is None else self.prefetch
        slots = 2 * size if self.prefetch_slots is None else self.prefetch_slots
        return Composition(
            placement=RandomPlacement(context.seed),
            assigner=GreedyAssigner(),
            prefetcher=RandomPrefetcher(context.experts, size, context.seed),
            cache=StaticCache(),
            demand_slots=self.demand_slots,
            prefetch_slots=slots,
            parameters={"prefetch": size, "prefetch_slots": slots},
        )
