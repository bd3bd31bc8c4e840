"""MoE-Infinity put together, as published and as its open-source version does it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from policies.assigners import LoadAll
from policies.lfu import LfuCache
from policies.moe_infinity import ActivationCache, ActivationMatcher, ActivationPrefetcher
from policies.placements import PoolPlacement
from policies.protocols import Composition, Needs
from policies.routers import TrueRouter
from policies.system import BuildContext, System, at_least

NEEDS = Needs(tokens=True, calibration=True, gpu_only=True)
CODE_NEEDS = Needs(gpu_only=True)


@dataclass(frozen=True)
class MoeInfinityParameters:
    """MoE-Infinity as algorithms.md, Section 6, fills it in.

    library: past sequences that are kept, the last of the calibration's; 1,000 in the released code (trace_capacity).
    lookahead: how many layers ahead prefetches reach. None: to the last layer of the pass.
    prefetch: how many experts may wait to be prefetched at a time, 0 for none; they are ranked anew in every layer, so
        that only those that the link can bring during one layer matter (ours).
    demand_slots: staging slots for loads of an event that is larger than the cache (ours).

    Past sequences are the calibration's: none is added while a run plays its one batch.
    """

    library: int = 1000
    lookahead: int | None = None
    prefetch: int = 16
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """There is something to match, and a slot for loads."""
        at_least(self, library=1, lookahead=1, prefetch=0, demand_slots=1)


def build(parameters: MoeInfinityParameters, context: BuildContext) -> Composition:
    """One pool, ranked by what the batch is expected to use."""
    library = context.required_calibration("moe-infinity").activations[-parameters.library :]
    matcher = ActivationMatcher(library, context.batch)
    cache = ActivationCache(matcher)
    size, lookahead = parameters.prefetch, parameters.lookahead or context.layers
    return Composition(
        name="moe-infinity",
        placement=PoolPlacement(),
        router=TrueRouter(),
        assigner=LoadAll(),
        prefetcher=ActivationPrefetcher(matcher, cache, size, lookahead) if size else None,
        cache=cache,
        needs=NEEDS,
        demand_slots=parameters.demand_slots,
        parameters={**asdict(parameters), "lookahead": lookahead},
    )


@dataclass(frozen=True)
class MoeInfinityCodeParameters:
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


def build_code(parameters: MoeInfinityCodeParameters, context: BuildContext) -> Composition:
    """One pool; the fewest visits since it came in leaves."""
    return Composition(
        name="moe-infinity@impl",
        placement=PoolPlacement(),
        router=TrueRouter(),
        assigner=LoadAll(),
        prefetcher=None,
        cache=LfuCache(history=False, recency=False),
        needs=CODE_NEEDS,
        demand_slots=parameters.demand_slots,
        parameters=asdict(parameters),
    )


MOE_INFINITY = System(
    name="moe-infinity",
    summary="GPU only: activation matrices of past sequences rank prefetches of later layers and who stays in one pool",
    source="MoE-Infinity, as filled in by algorithms.md, Section 6",
    parameters=MoeInfinityParameters,
    build=build,
    needs=NEEDS,
)
MOE_INFINITY_IMPL = System(
    name="moe-infinity@impl",
    summary="GPU only: no prefetches; one pool, evicting the fewest visits since coming in",
    source="EfficientMoE/MoE-Infinity d617801; implementations.md, Section 1.7",
    parameters=MoeInfinityCodeParameters,
    build=build_code,
    needs=CODE_NEEDS,
)
