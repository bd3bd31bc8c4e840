"""Any placement, router, assigner, prefetcher and cache together: a composition by the names of its parts.

What the search for better compositions searches (``notebooks/better_compositions.ipynb``), and what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from policies.papers.dali.assignment import BeamAssigner, GreedyAssigner
from policies.papers.hybrimoe.mrs import MrsCache
from policies.papers.hybrimoe.prefetch import ImpactPrefetcher
from policies.papers.hybrimoe.schedule import Schedule, SimulationAssigner
from policies.papers.smoe.router import CacheRouter
from policies.papers.smoe.score_window import ScoreWindowCache
from policies.papers.smoe.two_pointer import TwoPointer
from policies.parts.assigners import CostRule, LoadAll, ResidentOrCpu
from policies.parts.caches import StaticCache
from policies.parts.exact_assignment import ExactAssigner
from policies.parts.forecast_prefetch import ForecastPrefetcher
from policies.parts.lfu import LfuCache
from policies.parts.lru import LruCache
from policies.parts.pipeline_assigner import PipelineAssigner
from policies.parts.placements import NoPlacement, Pooled, PopularityPlacement, RandomPlacement
from policies.parts.routers import TrueRouter
from policies.parts.top_prefetch import TopPrefetcher
from policies.protocols import Assigner, Cache, Composition, Needs, Placement, Prefetcher, Router
from policies.system import BuildContext, ChoiceError, System, at_least, shares

Assigners = Literal[
    "stay", "load-all", "cost-rule", "greedy", "beam", "exact", "simulation", "two_pointer", "two_pointer_min",
    "pipeline",
]  # fmt: skip
ASSIGNERS: Mapping[Assigners, Callable[[], Assigner]] = {
    "stay": ResidentOrCpu,
    "load-all": LoadAll,
    "cost-rule": CostRule,
    "greedy": GreedyAssigner,
    "beam": BeamAssigner,
    "exact": ExactAssigner,
    "simulation": lambda: SimulationAssigner(Schedule()),
    "two_pointer": TwoPointer,
    "two_pointer_min": lambda: TwoPointer(sooner=True),
    "pipeline": PipelineAssigner,
}


@dataclass(frozen=True)
class MixParameters:
    """Names of parts, and what they need to be told. All of it is ours; the parts say where they are from.

    placement: who is there at first: "none", "random" or "popular" (calibrated). pool: one cache over all layers.
    substitution: alpha of SMoE's router, which changes the routing; 0 keeps the model's.
    assigner: "stay" leaves every expert where it lies; "two_pointer" and "two_pointer_min" are SMoE's.
    prefetch: "none"; "top", the two experts of the next layer with most forecast workload (DALI); "impact" (HybriMoE),
        which goes to the cache; "forecast", all that are worth a copy.
    forecast: its kind for the next layer. lookahead: layers ahead; those beyond the next are forecast by the gate, so
        "top" takes 1, and "impact", which reads one kind, takes more with "gate" alone.
    into: where prefetches go; "staging" has 4 slots.
    cache: who leaves. alpha: of MRS, the weight of the present. keep: its p. None: all experts. prior: MRS starts from
        calibrated popularity.
    demand_slots: staging slots for loads that the cache has no room for.
    """

    placement: Literal["none", "random", "popular"] = "random"
    pool: bool = False
    substitution: float = 0.0
    assigner: Assigners = "pipeline"
    prefetch: Literal["none", "top", "impact", "forecast"] = "forecast"
    forecast: Literal["gate", "residual", "quasi_hidden", "estimator"] = "gate"
    lookahead: Literal[1, 2, 3] = 1
    into: Literal["cache", "staging"] = "cache"
    cache: Literal["static", "lru", "lfu", "mrs", "score-window"] = "lru"
    alpha: float = 0.3
    keep: int | None = None
    prior: bool = False
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Shares are shares, loads need a slot, and no part is told what it would ignore."""
        at_least(self, keep=1, demand_slots=1)
        shares(self, "substitution", "alpha")
        if self.prefetch == "top" and self.lookahead > 1:
            raise ChoiceError(
                f"parameter 'lookahead': prefetch 'top' expects 1, got {self.lookahead}; it looks at the next layer "
                f"alone: choose prefetch 'forecast' or 'impact' for more"
            )
        if self.prefetch == "impact" and self.lookahead > 1 and self.forecast != "gate":
            raise ChoiceError(
                f"parameter 'forecast': prefetch 'impact' with lookahead {self.lookahead} expects 'gate', got "
                f"{self.forecast!r}; it reads one kind: choose lookahead 1, or prefetch 'forecast'"
            )
        if self.prefetch == "impact" and self.into == "staging":
            raise ChoiceError(
                "parameter 'into': prefetch 'impact' expects 'cache', got 'staging': choose prefetch 'forecast' or "
                "'top' for staging"
            )


def build(parameters: MixParameters, context: BuildContext, name: str = "mix") -> Composition:
    """The parts, by their names."""
    prefetcher = _prefetcher(parameters)
    return Composition(
        name=name,
        placement=_placement(parameters, context),
        router=_router(parameters, context),
        assigner=ASSIGNERS[parameters.assigner](),
        prefetcher=prefetcher,
        cache=_cache(parameters, context, name),
        needs=needs_of(parameters),
        demand_slots=parameters.demand_slots,
        prefetch_slots=4 if prefetcher is not None and parameters.into == "staging" else 0,
        decision_cost=_decision_cost(parameters, name),
        parameters=asdict(parameters),
    )


def needs_of(parameters: MixParameters) -> Needs:
    """What these parts must be given."""
    substitutes, splits = parameters.substitution > 0, parameters.assigner in ("two_pointer", "two_pointer_min")
    forecasts = [(parameters.forecast, 1), *(("gate", ahead) for ahead in range(2, parameters.lookahead + 1))]
    return Needs(
        scores=substitutes or splits or parameters.cache in ("mrs", "score-window"),
        tokens=substitutes or splits,
        forecasts=() if parameters.prefetch == "none" else tuple(forecasts),
        calibration=parameters.placement == "popular" or (parameters.cache == "mrs" and parameters.prior),
        changes_routing=substitutes,
    )


def _decision_cost(parameters: MixParameters, name: str) -> str:
    """The row of the system that thinks in the same way: only some mixes have been measured."""
    if name != "mix":
        return name
    if parameters.prefetch == "impact" or parameters.assigner == "simulation":
        return "hybrimoe"
    scored = "best-exact" if parameters.cache in ("mrs", "score-window") else name
    return {"greedy": "dali", "beam": "dali-beam", "exact": "dali-ilp"}.get(parameters.assigner, scored)


def _placement(parameters: MixParameters, context: BuildContext) -> Placement:
    placement: Placement = NoPlacement()
    if parameters.placement == "random":
        placement = RandomPlacement(context.seed)
    elif parameters.placement == "popular":
        placement = PopularityPlacement(uniform=not parameters.pool)
    return Pooled(placement) if parameters.pool else placement


def _router(parameters: MixParameters, context: BuildContext) -> Router:
    alpha = parameters.substitution
    return CacheRouter(alpha, norm_topk=context.norm_topk) if alpha else TrueRouter()


def _prefetcher(parameters: MixParameters) -> Prefetcher | None:
    match parameters.prefetch:
        case "top":
            return TopPrefetcher(2, parameters.forecast, parameters.into)
        case "impact":
            return ImpactPrefetcher(Schedule(), kind=parameters.forecast, pooled=parameters.pool)
        case "forecast":
            return ForecastPrefetcher(parameters.into)
    return None


def _cache(parameters: MixParameters, context: BuildContext, name: str) -> Cache:
    match parameters.cache:
        case "lru":
            return LruCache()
        case "lfu":
            return LfuCache()
        case "score-window":
            return ScoreWindowCache(context.layers, context.experts)
        case "mrs":
            prior = context.required_calibration(name).popularity.tolist() if parameters.prior else None
            keep = parameters.keep or context.experts
            return MrsCache(context.layers, context.experts, keep, parameters.alpha, prior=prior)
    return StaticCache()


MIX = System(
    name="mix",
    summary="any parts together, by their names",
    source="ours",
    parameters=MixParameters,
    build=build,
    needs=needs_of(MixParameters()),
)
