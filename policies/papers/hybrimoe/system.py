"""HybriMoE as published, and as released with its two-pointer assigner and its prefetches by cache score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertId, Forecast, LayerView
from policies.papers.hybrimoe.mrs import MrsCache
from policies.papers.hybrimoe.prefetch import ImpactPrefetcher
from policies.papers.hybrimoe.schedule import Rule, Schedule, SimulationAssigner
from policies.parts.assigners import ByPhase, LoadAll
from policies.parts.placements import PoolPlacement, RandomPlacement, random_or_popular
from policies.parts.prefetchers import NoProtection
from policies.protocols import Composition, Needs
from policies.system import BuildContext, ChoiceError, NonNegative, Policy, register
from trilane.common.hints import Count, Share


class HssAssigner:
    """HSS() of the released code: cached experts by descending workload, then absent ones, in one row. The GPU takes
    from the front, the CPU from the back, whichever would finish sooner; ties go to the GPU.

    An absent expert on the GPU adds a copy to the link's time, and the GPU waits until the link is done. Ours: experts
    that are being copied stand between the two, and the link starts with what is left of the running copy.
    """

    def assign(self, view: LayerView) -> Assignment:
        """Two pointers, one pass."""
        costs, ready = view.costs[view.layer], view.ready_ns
        workload = view.routing.workload()
        row = sorted(workload, key=lambda expert: (ready[expert], -workload[expert], expert))
        gpu_ns, cpu_ns, link_ns = costs.first_gpu_ns, view.cpu_backlog_ns, view.h2d_backlog_ns
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


class CacheScorePrefetcher(NoProtection):
    """The ``size`` experts of the next layer with the largest S of its MRS cache, in the released code's way: without a
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


@register("hybrimoe", "simulated schedule, prefetching by impact, MRS cache", source="HybriMoE, Sections IV-B to IV-D")
@dataclass(frozen=True)
class HybriMoe(Policy):
    """Parameters of HybriMoE as published, most of which the paper leaves open.

    rule: the schedule's "earliest completion time" (Section IV-B) is that of the operation which would "finish"
        earliest, or that of the device which is free earliest ("device_free").
    guard: time loads with the GPU's computation, and let the CPU take a cached expert only if it finishes no later than
        the GPU would (ours); False is the listing as it stands.
    prefetch: most picks a decision, 0 for none. Each decision replaces what has not started, and in addition to a
        layer's own loads the link has time for one copy, at most two (bundled trace, rtx3090-ddr4): 4 leave it with
        something to do while attention runs, and more would only cost decision time (ours).
    lookahead: layers that are forecast, 3 in Section IV-C.
    discount: what a gain is multiplied by for every layer further ahead (ours; the paper has none, that is 1).
    arrival: a late copy counts by the share of it that is hidden (ours; the paper has no such rule: False).
    alpha: of the MRS cache (Section IV-D, Eq. 3); unpublished, 0.3 is ours. keep: its p. None: twice the model's top-k.
    background: at the end of a layer, in decode, copy its absent expert of largest S into the slot of the
        resident of least S; without it only what is loaded or prefetched is admitted, so that a cache alone
        ("+Caching" in Table III) has nothing to change. admit_by_score: a load of less S than the
        expert that it would displace is not kept. The paper is silent on both.
    pool: one cache over all layers, empty at first, instead of the same slots in every layer (the paper specifies
        neither).
    start: experts in these slots at first, drawn at "random" as DALI's, or each layer's most "popular" on calibration
        prompts, as KTransformers' are (the paper is silent).
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    rule: Rule = "finish"
    guard: bool = True
    prefetch: NonNegative = 4
    lookahead: Literal[1, 2, 3] = 3
    discount: Share = 1.0
    arrival: bool = True
    alpha: Share = 0.3
    keep: Count | None = None
    background: bool = False
    admit_by_score: bool = False
    pool: bool = False
    start: Literal["random", "popular"] = "random"
    demand_slots: Count = 2

    def __post_init__(self) -> None:
        """A pool is empty at first."""
        if self.pool and self.start == "popular":
            raise ChoiceError("start: 'popular' fills slots by layer; leave 'pool'")

    @property
    def needs(self) -> Needs:
        """Forecasts as far as prefetching looks ahead; calibration where the start needs it."""
        ahead = range(1, self.lookahead + 1) if self.prefetch else ()
        forecasts = tuple(("gate", layers) for layers in ahead)
        return Needs(scores=True, forecasts=forecasts, calibration=self.start == "popular")

    def compose(self, context: BuildContext) -> Composition:
        """Simulation, impact and MRS."""
        schedule, keep = Schedule(self.rule, self.guard), self.keep or 2 * context.top_k
        prefetcher = ImpactPrefetcher(schedule, self.prefetch, self.discount, pooled=self.pool, arrival=self.arrival)
        cache = MrsCache(
            context.layers, context.experts, keep, self.alpha,
            background="decode" if self.background else None, by_score=self.admit_by_score,
        )
        return Composition(
            placement=PoolPlacement() if self.pool else random_or_popular(self.start, context.seed),
            assigner=SimulationAssigner(schedule),
            prefetcher=prefetcher if self.prefetch else None,
            cache=cache,
            demand_slots=self.demand_slots,
            parameters={"keep": keep},
        )


@register(
    "hybrimoe@impl",
    "prefill on the GPU, decode by two pointers, MRS cache",
    source="PKU-SEC-Lab/HybriMoE 508a85b, ktransformers/operators/experts.py",
)
@dataclass(frozen=True)
class HybriMoeImpl(Policy):
    """HybriMoE as released (ktransformers/operators/experts.py): in prefill every expert on the GPU, in decode HSS();
    prefetches by the cache's own scores. Times are the planner's, not the constants that are typed in there.

    prefetch_size: how many experts of the next layer to prefetch, by S; 0 in the README's example.
    alpha: 0.5 in the code. keep: its p. None: twice the model's top-k, 12 in the code (DeepSeek). S follows the first
        token's scores alone.
    demand_slots: staging slots for loads that the cache has no room for (ours). The cache starts at random (ours).
    """

    needs = Needs(scores=True)

    prefetch_size: NonNegative = 0
    alpha: Share = 0.5
    keep: Count | None = None
    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        """LoadAll or HSS() by the phase, and prefetches by S."""
        size, keep = self.prefetch_size, self.keep or 2 * context.top_k
        cache = MrsCache(context.layers, context.experts, keep, self.alpha, "first")
        return Composition(
            placement=RandomPlacement(context.seed),
            assigner=ByPhase(LoadAll(), HssAssigner()),
            prefetcher=CacheScorePrefetcher(cache, size) if size else None,
            cache=cache,
            demand_slots=self.demand_slots,
            parameters={"keep": keep},
        )
