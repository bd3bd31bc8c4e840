"""Any placement, router, assigner, prefetcher and cache together: a composition by the names of its parts.

What the search for better compositions searches (``notebooks/better_compositions.ipynb``), and what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from policies.papers.dali.parts import BeamAssigner, GreedyAssigner
from policies.papers.hybrimoe.mrs import MrsCache
from policies.papers.hybrimoe.prefetch import ImpactPrefetcher
from policies.papers.hybrimoe.schedule import Schedule, SimulationAssigner
from policies.papers.smoe import CacheRouter, ScoreWindowCache, TwoPointer
from policies.parts.assigners import ByPhase, CostRule, LoadAll, ResidentOrCpu
from policies.parts.caches import FifoCache, LfuCache, LruCache, StaticCache
from policies.parts.exact_assignment import ExactAssigner
from policies.parts.pipeline_assigner import PipelineAssigner
from policies.parts.placements import NoPlacement, Pooled, PopularityPlacement, RandomPlacement
from policies.parts.prefetchers import ForecastPrefetcher, TopPrefetcher
from policies.parts.routers import TrueRouter
from policies.protocols import Assigner, Cache, Composition, Needs, Placement, Prefetcher
from policies.system import BuildContext, ChoiceError, Policy, register
from trilane.common.hints import Count, Share

Assigners = Literal[
    "stay", "load-all", "load-prefill", "cost-rule", "greedy", "beam", "exact", "simulation", "two_pointer",
    "two_pointer_min", "pipeline",
]
ASSIGNERS: Mapping[Assigners, Callable[[], Assigner]] = {
    "stay": ResidentOrCpu,
    "load-all": LoadAll,
    "load-prefill": lambda: ByPhase(LoadAll(), ResidentOrCpu()),
    "cost-rule": CostRule,
    "greedy": GreedyAssigner,
    "beam": BeamAssigner,
    "exact": ExactAssigner,
    "simulation": lambda: SimulationAssigner(Schedule()),
    "two_pointer": TwoPointer,
    "two_pointer_min": lambda: TwoPointer(sooner=True),
    "pipeline": PipelineAssigner,
}


@register("mix", "any parts together, by their names")
@dataclass(frozen=True)
class Mix(Policy):
    """Names of parts, and their parameters. The combination is ours; the parts name their sources.

    placement: which experts are resident at first: "none", "random" or "popular" (calibrated). pool: one cache over all
        layers.
    substitution: alpha of SMoE's router, which changes the routing; 0 keeps the model's.
    assigner: "stay" runs every expert where it is, "load-prefill" in decode alone; "two_pointer" and
        "two_pointer_min" are SMoE's. copy_weight: of "pipeline", the part of a copy's time that counts when a load is
        weighed; below 1, experts are loaded for the sake of later tokens, too.
    prefetch: "none"; "top", the two experts of the next layer with most forecast workload (DALI); "impact" (HybriMoE);
        "forecast", all that are worth a copy.
    forecast: its kind for the next layer; "token" is of all later layers, made by the token before, and goes with
        lookahead 1. lookahead: layers ahead; those beyond the next are forecast by the gate, so "top" takes 1, and
        "impact", which reads one kind, takes more with "gate" alone.
    into: where prefetches go; "staging" has 4 slots.
    cache: which expert is evicted. alpha: of MRS, the weight of the present. keep: its p. None: all experts. prior: MRS
        starts from calibrated popularity. background: a phase in which MRS copies, at the end of a layer, its best
        absent expert into the slot of its worst resident.
    demand_slots: staging slots for loads that the cache has no room for.
    """

    placement: Literal["none", "random", "popular"] = "random"
    pool: bool = False
    substitution: Share = 0.0
    assigner: Assigners = "pipeline"
    copy_weight: Share = 1.0
    prefetch: Literal["none", "top", "impact", "forecast"] = "forecast"
    forecast: Literal["gate", "residual", "quasi_hidden", "estimator", "token"] = "gate"
    lookahead: Literal[1, 2, 3] = 1
    into: Literal["cache", "staging"] = "cache"
    cache: Literal["static", "fifo", "lru", "lfu", "mrs", "score-window"] = "lru"
    alpha: Share = 0.3
    keep: Count | None = None
    prior: bool = False
    background: Literal["none", "prefill", "decode"] = "none"
    demand_slots: Count = 2

    def __post_init__(self) -> None:
        """No prefetcher is given what it would ignore, and no cache but MRS a background of one's own choice."""
        if self.prefetch == "top" and self.lookahead > 1:
            raise ChoiceError(
                f"lookahead: prefetch 'top' expects 1, got {self.lookahead}; it looks at the next layer "
                f"alone: choose prefetch 'forecast' or 'impact' for more"
            )
        if self.prefetch == "impact" and self.lookahead > 1 and self.forecast != "gate":
            raise ChoiceError(
                f"forecast: prefetch 'impact' with lookahead {self.lookahead} expects 'gate', got "
                f"{self.forecast!r}; it reads one kind: choose lookahead 1, or prefetch 'forecast'"
            )
        if self.forecast == "token" and self.lookahead > 1:
            raise ChoiceError(
                f"lookahead: forecast 'token' expects 1, got {self.lookahead}; it is of all later layers as it is"
            )
        if self.assigner != "pipeline" and self.copy_weight != type(self).copy_weight:
            raise ChoiceError(f"copy_weight: expects assigner 'pipeline', got {self.assigner!r}")
        if self.cache != "mrs" and self.background not in ("none", type(self).background):
            raise ChoiceError(f"background: expects cache 'mrs', got {self.cache!r}")

    @property
    def needs(self) -> Needs:
        """The needs of the chosen parts."""
        substitutes, splits = self.substitution > 0, self.assigner in ("two_pointer", "two_pointer_min")
        forecasts = [(self.forecast, 1), *(("gate", ahead) for ahead in range(2, self.lookahead + 1))]
        return Needs(
            scores=substitutes or splits or self.cache in ("mrs", "score-window"),
            tokens=substitutes or splits,
            forecasts=() if self.prefetch == "none" else tuple(forecasts),
            calibration=self.placement == "popular" or (self.cache == "mrs" and self.prior),
            changes_routing=substitutes,
        )

    def compose(self, context: BuildContext) -> Composition:
        """The parts, by their names."""
        cache, alpha = self._cache(context), self.substitution
        prefetcher = self._prefetcher(cache)
        return Composition(
            placement=self._placement(context),
            router=CacheRouter(alpha, norm_topk=context.norm_topk) if alpha else TrueRouter(),
            assigner=PipelineAssigner(self.copy_weight) if self.assigner == "pipeline" else ASSIGNERS[self.assigner](),
            prefetcher=prefetcher,
            cache=cache,
            demand_slots=self.demand_slots,
            prefetch_slots=4 if prefetcher is not None and self.into == "staging" else 0,
            decision_cost=self._decision_cost(),
        )

    def _decision_cost(self) -> str:
        """The row of the policy that decides in the same way: only some mixes have been measured."""
        if self.prefetch == "impact" or self.assigner == "simulation":
            return "hybrimoe"
        scored = "best-exact" if self.cache in ("mrs", "score-window") else "mix"
        return {"greedy": "dali", "beam": "dali-beam", "exact": "dali-ilp"}.get(self.assigner, scored)

    def _placement(self, context: BuildContext) -> Placement:
        placement: Placement = NoPlacement()
        if self.placement == "random":
            placement = RandomPlacement(context.seed)
        elif self.placement == "popular":
            placement = PopularityPlacement(uniform=not self.pool)
        return Pooled(placement) if self.pool else placement

    def _prefetcher(self, cache: Cache) -> Prefetcher | None:
        match self.prefetch:
            case "top":
                return TopPrefetcher(2, self.forecast, self.into)
            case "impact":
                return ImpactPrefetcher(Schedule(), kind=self.forecast, pooled=self.pool, into=self.into)
            case "forecast":
                return ForecastPrefetcher(self.into, cache if isinstance(cache, MrsCache) else None, pooled=self.pool)
        return None

    def _cache(self, context: BuildContext) -> Cache:
        match self.cache:
            case "fifo":
                return FifoCache()
            case "lru":
                return LruCache()
            case "lfu":
                return LfuCache()
            case "score-window":
                return ScoreWindowCache(context.layers, context.experts)
            case "mrs":
                prior = context.required_calibration().popularity.tolist() if self.prior else None
                keep = self.keep or context.experts
                background = None if self.background == "none" else self.background
                return MrsCache(
                    context.layers, context.experts, keep, self.alpha,
                    prior=prior, background=background, reached_first=self.pool,
                )
        return StaticCache()
