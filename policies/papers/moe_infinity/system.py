"""MoE-Infinity put together, as published and as its open-source version does it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from policies.papers.moe_infinity.parts import ActivationCache, ActivationMatcher, ActivationPrefetcher
from policies.parts.assigners import LoadAll
from policies.parts.lfu import LfuCache
from policies.parts.placements import Pooled, PoolPlacement, PopularityPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Composition, Needs
from policies.system import BuildContext, System, at_least

NEEDS = Needs(tokens=True, calibration=True, gpu_only=True)
NEEDS_IMPL = Needs(gpu_only=True)


@dataclass(frozen=True)
class MoeInfinityParameters:
    """MoE-Infinity, as read in docs/readings.md.

    library: past sequences that are kept, the last of the calibration's; 1,000 in the released code (trace_capacity).
    lookahead: how many layers ahead prefetches reach. None: to the last layer of the pass.
    prefetch: how many experts may wait to be prefetched at a time, 0 for none; they are ranked anew in every layer, so
        that only those that the link can bring during one layer matter (ours).
    floor: only experts that are likelier than this to be used in the step are prefetched (ours). More likely than not,
        because a copy that is wasted keeps the link from those that a layer waits for. 0: all that are predicted at
        all, which is the literal reading, and nearly every expert.
    start: who is in the pool at first: the "ranked" most used experts of the past sequences, or nobody, "empty" (ours).
    demand_slots: staging slots for loads of an event that is larger than the cache (ours).

    Past sequences are the calibration's: none is added while a run plays its one batch.
    """

    library: int = 1000
    lookahead: int | None = None
    prefetch: int = 16
    floor: float = 0.5
    start: Literal["ranked", "empty"] = "ranked"
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """There is something to match, and a slot for loads."""
        at_least(self, library=1, lookahead=1, prefetch=0, floor=0, demand_slots=1)


def build(parameters: MoeInfinityParameters, context: BuildContext) -> Composition:
    """One pool, ranked by what the batch is expected to use."""
    library = context.required_calibration("moe-infinity").activations[-parameters.library :]
    matcher = ActivationMatcher(library, context.batch, context.top_k)
    cache = ActivationCache(matcher)
    size, lookahead = parameters.prefetch, parameters.lookahead or context.layers
    full = parameters.start == "ranked"
    return Composition(
        name="moe-infinity",
        placement=Pooled(PopularityPlacement(popularity=library.sum(axis=0))) if full else PoolPlacement(),
        router=TrueRouter(),
        assigner=LoadAll(),
        prefetcher=ActivationPrefetcher(matcher, cache, size, lookahead, parameters.floor) if size else None,
        cache=cache,
        needs=NEEDS,
        demand_slots=parameters.demand_slots,
        parameters={**asdict(parameters), "lookahead": lookahead},
    )


@dataclass(frozen=True)
class MoeInfinityImplParameters:
    """The open-source version (commit d617801): its wrappers of Mixtral and DeepSeek have prefetching commented out.

    demand_slots: staging slots for loads of an event that is larger than the cache (ours).

    Of equally many visits the lowest expert leaves, then the lowest layer: its scan (expert_dispatcher.cpp) takes the
    first. Its free budget also shrinks with every hit during warm-up, so that it may hold less than it was given; that
    is not modelled: give it a smaller cache.
    """

    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Loads need a slot."""
        at_least(self, demand_slots=1)


def build_impl(parameters: MoeInfinityImplParameters, context: BuildContext) -> Composition:
    """One pool; the fewest visits since it came in leaves."""
    return Composition(
        name="moe-infinity@impl",
        placement=PoolPlacement(),
        router=TrueRouter(),
        assigner=LoadAll(),
        prefetcher=None,
        cache=LfuCache(history=False, recency=False),
        needs=NEEDS_IMPL,
        demand_slots=parameters.demand_slots,
        parameters=asdict(parameters),
    )


MOE_INFINITY = System(
    name="moe-infinity",
    summary="past sequences rank prefetches, and who stays",
    source="MoE-Infinity (arXiv 2401.14361), as read in docs/readings.md#moe-infinity",
    parameters=MoeInfinityParameters,
    build=build,
    needs=NEEDS,
)
MOE_INFINITY_IMPL = System(
    name="moe-infinity@impl",
    summary="one pool, the fewest visits leave; no prefetches",
    source="EfficientMoE/MoE-Infinity d617801; docs/readings.md#moe-infinity",
    parameters=MoeInfinityImplParameters,
    build=build_impl,
    needs=NEEDS_IMPL,
)
