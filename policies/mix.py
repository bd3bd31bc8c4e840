"""Any placement, router, assigner, prefetcher and cache together: a composition by the names of its parts.

What the search for better compositions searches (``notebooks/better_compositions.ipynb``), and what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from policies.assigners import CostRule, LoadAll, ResidentOrCpu
from policies.caches import StaticCache
from policies.dali import BeamAssigner, GreedyAssigner, ResidualPrefetcher
from policies.exact_assignment import ExactAssigner
from policies.forecast_prefetch import ForecastPrefetcher
from policies.hybrimoe_prefetch import ImpactPrefetcher
from policies.hybrimoe_schedule import Schedule, SimulationAssigner
from policies.lfu import LfuCache
from policies.lru import LruCache
from policies.mrs import MrsCache
from policies.pipeline_assigner import PipelineAssigner
from policies.placements import NoPlacement, Pooled, PopularityPlacement, RandomPlacement
from policies.protocols import Assigner, Cache, Composition, Needs, Placement, Prefetcher, Router
from policies.routers import TrueRouter
from policies.score_window import ScoreWindowCache
from policies.smoe_router import CacheRouter
from policies.system import BuildContext, System, at_least
from policies.two_pointer import TwoPointer

Assigners = Literal[
    "stay", "load-all", "cost-rule", "greedy", "beam", "exact", "simulation", "two-pointer", "pipeline"
]  # fmt: skip
ASSIGNERS: Mapping[Assigners, Callable[[], Assigner]] = {
    "stay": ResidentOrCpu,
    "load-all": LoadAll,
    "cost-rule": CostRule,
    "greedy": GreedyAssigner,
    "beam": BeamAssigner,
    "exact": ExactAssigner,
    "simulation": lambda: SimulationAssigner(Schedule()),
    "two-pointer": lambda: TwoPointer(sooner=True),
    "pipeline": PipelineAssigner,
}


@dataclass(frozen=True)
class MixParameters:
    """Names of parts, and what they need to be told. All of it is ours; the parts say where they are from.

    placement: who is there at first: "none", "random" or "popular" (calibrated). pool: one cache over all layers.
    substitution: alpha of SMoE's router, which changes the routing; 0 keeps the model's.
    assigner: "stay" leaves every expert where it lies.
    prefetch: "none"; "top", the two experts of the next layer with most forecast workload (DALI); "impact" (HybriMoE);
        "forecast", all that are worth a copy. forecast: its kind for the next layer. lookahead: layers ahead; those
        beyond the next are forecast by the gate. into: where prefetches go; "staging" has 4 slots.
    cache: who leaves. memory: alpha of MRS, the weight of the present. keep: its p. None: all experts. prior: MRS
        starts from calibrated popularity.
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
    memory: float = 0.3
    keep: int | None = None
    prior: bool = False
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Shares are shares, and loads need a slot."""
        at_least(self, keep=1, demand_slots=1)
        for name in ("substitution", "memory"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"parameter {name!r}: expected 0 to 1, got {getattr(self, name)}")


def build(parameters: MixParameters, context: BuildContext, name: str = "mix") -> Composition:
    """The parts, by their names."""
    prefetcher = _prefetcher(parameters)
    return Composition(
        name=name,
        placement=_placement(parameters, context),
        router=_router(parameters),
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
    substitutes = parameters.substitution > 0
    forecasts = [(parameters.forecast, 1), *(("gate", ahead) for ahead in range(2, parameters.lookahead + 1))]
    return Needs(
        scores=substitutes or parameters.cache in ("mrs", "score-window") or parameters.assigner == "two-pointer",
        tokens=substitutes,
        forecasts=() if parameters.prefetch == "none" else tuple(forecasts),
        calibration=parameters.placement == "popular" or (parameters.cache == "mrs" and parameters.prior),
        changes_routing=substitutes,
    )


def _decision_cost(parameters: MixParameters, name: str) -> str:
    """The row of the system that thinks as long; measured by itself with the default parts."""
    if parameters.prefetch == "impact":
        return "hybrimoe"
    return {"greedy": "dali", "beam": "dali-beam", "exact": "dali-ilp", "simulation": "hybrimoe"}.get(
        parameters.assigner, name
    )


def _placement(parameters: MixParameters, context: BuildContext) -> Placement:
    placement: Placement = NoPlacement()
    if parameters.placement == "random":
        placement = RandomPlacement(context.seed)
    elif parameters.placement == "popular":
        placement = PopularityPlacement(uniform=not parameters.pool)
    return Pooled(placement) if parameters.pool else placement


def _router(parameters: MixParameters) -> Router:
    return CacheRouter(parameters.substitution) if parameters.substitution else TrueRouter()


def _prefetcher(parameters: MixParameters) -> Prefetcher | None:
    match parameters.prefetch:
        case "top":
            return ResidualPrefetcher(2, parameters.forecast, parameters.into)
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
            return MrsCache(context.layers, context.experts, keep, parameters.memory, prior=prior)
    return StaticCache()


MIX = System(
    name="mix",
    summary="any placement, router, assigner, prefetcher and cache together, by the names of the parts",
    source="ours",
    parameters=MixParameters,
    build=build,
    needs=needs_of(MixParameters()),
)
