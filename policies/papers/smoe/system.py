"""SMoE: substitution, score-window cache, prefetches from a partial forward pass, two-pointer split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policies.papers.smoe.parts import ScoreWindowCache, TopScorePrefetcher, TwoPointer
from policies.papers.smoe.router import CacheRouter
from policies.parts.assigners import LoadAll
from policies.parts.placements import Pooled, random_or_popular
from policies.parts.routers import TrueRouter
from policies.protocols import Assigner, Composition, Needs
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count, Share


@register("smoe", "resident experts replace low-score ones; two pointers", source="SMoE, Sections IV-V")
@dataclass(frozen=True)
class Smoe(Policy):
    """Parameters of SMoE. The paper starts from a GPU that holds some experts and does not say which: here even slots.

    alpha: substitution threshold, 0 to 1; 0 keeps the model's routing. The paper uses 0.35, 0.30 and 0.25 (S1-S3,
        Section VI-B); the default is the least, that of its largest model (Qwen2-57B, S3).
    listing: Algorithm 1 as printed instead of the text: one pass, so that a token sees the top-score experts of the
        tokens before it only; and low-score experts on the GPU are exchanged too.
    window: steps that the cache averages over; not published, ours.
    assigner: Algorithm 2 as printed ("two_pointer"), or with the objective of Eq. 4 ("two_pointer_min"); "load-all" is
        Fig. 14 without CPU-assisted scheduling.
    history: CPU experts over which C_cpu is averaged; not published, ours.
    pool: one cache over all layers, as in the released code; the paper does not say.
    start: experts on the GPU at first: drawn at "random", or each layer's most "popular" on calibration prompts.
    prefetch: copy forecast top-score experts (Section IV-C); off: the "+CR" of Fig. 14 with CPU-assisted scheduling.
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    alpha: Share = 0.25
    listing: bool = False
    window: Count = 16
    assigner: Literal["two_pointer", "two_pointer_min", "load-all"] = "two_pointer"
    history: Count = 32
    prefetch: bool = True
    pool: bool = False
    start: Literal["random", "popular"] = "random"
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        """Scores of all experts; a forecast for prefetches; calibration where the start needs it."""
        return Needs(
            scores=True, tokens=True, forecasts=(("partial", 1),) if self.prefetch else (),
            changes_routing=self.alpha > 0, calibration=self.start == "popular",
        )

    def compose(self, context: BuildContext) -> Composition:
        """SMoE as evaluated in Section VI, unless parameters say otherwise."""
        alpha, placement = self.alpha, random_or_popular(self.start, context.seed)
        return Composition(
            placement=Pooled(placement) if self.pool else placement,
            router=CacheRouter(alpha, self.listing, context.norm_topk) if alpha else TrueRouter(),
            assigner=self._assigner(),
            prefetcher=TopScorePrefetcher(alpha) if self.prefetch else None,
            cache=ScoreWindowCache(context.layers, context.experts, self.window),
            demand_slots=self.demand_slots,
        )

    def _assigner(self) -> Assigner:
        if self.assigner == "load-all":
            return LoadAll()
        return TwoPointer(self.history, sooner=self.assigner == "two_pointer_min")
