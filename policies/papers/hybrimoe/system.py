"""HybriMoE put together: as published, and as released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertId, Forecast, LayerView
from policies.papers.hybrimoe.mrs import MrsCache
from policies.papers.hybrimoe.prefetch import ImpactPrefetcher
from policies.papers.hybrimoe.schedule import Rule, Schedule, SimulationAssigner
from policies.parts.assigners import ByPhase, LoadAll
from policies.parts.forecasts import ProtectsNobody
from policies.parts.placements import PoolPlacement, RandomPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Composition, Needs
from policies.system import BuildContext, System, at_least, shares

NEEDS = Needs(scores=True, forecasts=(("gate", 1), ("gate", 2), ("gate", 3)))
NEEDS_IMPL = Needs(scores=True)


@dataclass(frozen=True)
class HybriMoeParameters:
    """Parameters of HybriMoE as published, most of which the paper leaves open.

    rule: the schedule's "earliest completion time" (Section IV-B) is that of the operation which would "finish"
        earliest, or that of the device which is free earliest ("device_free").
    guard: time loads with the GPU's computation, and let the CPU take a cached expert only if it is done no later than
        the GPU would be (ours); False is the listing as it stands.
    prefetch: most picks a decision, 0 for none. Each decision replaces what has not started, and beside a layer's own
        loads the link has time for one copy, at most two (bundled trace, rtx3090-ddr4): 4 leave it with something to
        do while attention runs, and more would be thinking for nothing (ours).
    lookahead: layers that are forecast, 3 in Section IV-C.
    discount: what a gain is multiplied by for every layer further ahead (ours; the paper has none, that is 1).
    arrival: a copy that would come late counts by the share of it that is hidden (ours; the paper does not ask: False).
    alpha: of the MRS cache (Section IV-D, Eq. 3); unpublished, 0.3 is ours. keep: its p. None: twice the model's top-k.
    pool: one cache over all layers, empty at first, instead of the same slots in every layer, with experts drawn at
        random at first as DALI's (the paper says nothing of either).
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    rule: Rule = "finish"
    guard: bool = True
    prefetch: int = 4
    lookahead: Literal[1, 2, 3] = 3
    discount: float = 1.0
    arrival: bool = True
    alpha: float = 0.3
    keep: int | None = None
    pool: bool = False
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Counts are not negative, shares are shares, and loads need a slot."""
        at_least(self, prefetch=0, keep=1, demand_slots=1)
        shares(self, "alpha", "discount")


@dataclass(frozen=True)
class HybriMoeImplParameters:
    """HybriMoE as released (ktransformers/operators/experts.py): in prefill every expert on the GPU, in decode HSS();
    prefetches by the cache's own scores. Times are the planner's, not the constants that are typed in there.

    prefetch_size: how many experts of the next layer to prefetch, by S; 0 in the README's example.
    alpha: 0.5 in the code. keep: its p. None: twice the model's top-k, 12 in the code (DeepSeek). S follows the first
        token's scores alone.
    demand_slots: staging slots for loads that the cache has no room for (ours). The cache starts at random (ours).
    """

    prefetch_size: int = 0
    alpha: float = 0.5
    keep: int | None = None
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Counts are not negative, shares are shares, and loads need a slot."""
        at_least(self, prefetch_size=0, keep=1, demand_slots=1)
        shares(self, "alpha")


class HssAssigner:
    """HSS() of the released code: cached experts by descending workload, then absent ones, in one row. The GPU takes
    from the front, the CPU from the back, whoever would finish sooner; ties go to the GPU.

    A taken absent expert adds a copy to the link's time, and the GPU waits until the link is done. Ours: experts that
    are being copied stand between the two, and the link starts with what is left of the running copy.
    """

    def assign(self, view: LayerView) -> Assignment:
        """Two pointers, one pass."""
        costs, ready = view.costs[view.layer], view.ready_ns
        workload = view.routing.workload()
        row = sorted(workload, key=lambda expert: (ready[expert], -workload[expert], expert))
        gpu_ns, cpu_ns, link_ns = 0, view.cpu_backlog_ns, view.h2d_backlog_ns
        first_ns = costs.first_cpu_ns
        front, back = 0, len(row)
        while front < back:
            here_ns = ready[row[front]]
            copied_ns = link_ns + costs.copy_ns if here_ns == INFINITE_NS else here_ns
            by_gpu = max(gpu_ns, copied_ns) + costs.gpu_ns[workload[row[front]]]
            by_cpu = cpu_ns + first_ns + costs.cpu_ns[workload[row[back - 1]]]
            if by_gpu <= by_cpu:
                link_ns = copied_ns if here_ns == INFINITE_NS else link_ns
                gpu_ns, front = by_gpu, front + 1
            else:
                cpu_ns, first_ns, back = by_cpu, 0, back - 1
        gpu = tuple(row[:front])
        loads = tuple(expert for expert in gpu if ready[expert] == INFINITE_NS)
        return Assignment(gpu, tuple(reversed(row[front:])), loads, max(gpu_ns, cpu_ns))


class CacheScorePrefetcher(ProtectsNobody):
    """Of the next layer the ``size`` experts with the largest S of its MRS cache, in the released code's way: without a
    forecast. Ties go to the lower id."""

    into: Literal["cache", "staging"] = "cache"

    def __init__(self, cache: MrsCache, size: int) -> None:
        self.cache = cache
        self.size = size

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Largest S first; residents among them need no copy."""
        layer = view.layer + 1
        scores = self.cache.scores(layer)
        best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: self.size]
        return [ExpertId(layer, expert) for expert in best]


def build(parameters: HybriMoeParameters, context: BuildContext) -> Composition:
    """Simulation, impact and MRS."""
    schedule = Schedule(parameters.rule, parameters.guard)
    size, keep = parameters.prefetch, parameters.keep or 2 * context.top_k
    prefetcher = ImpactPrefetcher(
        schedule, size, parameters.discount, pooled=parameters.pool, arrival=parameters.arrival
    )
    forecasts = NEEDS.forecasts[: parameters.lookahead] if size else ()
    return Composition(
        name="hybrimoe",
        placement=PoolPlacement() if parameters.pool else RandomPlacement(context.seed),
        router=TrueRouter(),
        assigner=SimulationAssigner(schedule),
        prefetcher=prefetcher if size else None,
        cache=MrsCache(context.layers, context.experts, keep, parameters.alpha),
        needs=Needs(scores=True, forecasts=forecasts),
        demand_slots=parameters.demand_slots,
        parameters={**asdict(parameters), "keep": keep},
    )


def build_impl(parameters: HybriMoeImplParameters, context: BuildContext) -> Composition:
    """LoadAll or HSS() by the phase, and prefetches by S."""
    size, keep = parameters.prefetch_size, parameters.keep or 2 * context.top_k
    cache = MrsCache(context.layers, context.experts, keep, parameters.alpha, "first")
    return Composition(
        name="hybrimoe@impl",
        placement=RandomPlacement(context.seed),
        router=TrueRouter(),
        assigner=ByPhase(LoadAll(), HssAssigner()),
        prefetcher=CacheScorePrefetcher(cache, size) if size else None,
        cache=cache,
        needs=NEEDS_IMPL,
        demand_slots=parameters.demand_slots,
        parameters={**asdict(parameters), "keep": keep},
    )


HYBRIMOE = System(
    name="hybrimoe",
    summary="simulated schedule, prefetching by impact, MRS cache",
    source="HybriMoE, Sections IV-B to IV-D",
    parameters=HybriMoeParameters,
    build=build,
    needs=NEEDS,
)
HYBRIMOE_IMPL = System(
    name="hybrimoe@impl",
    summary="prefill on the GPU, decode by two pointers, MRS cache",
    source="PKU-SEC-Lab/HybriMoE 508a85b, ktransformers/operators/experts.py",
    parameters=HybriMoeImplParameters,
    build=build_impl,
    needs=NEEDS_IMPL,
)
