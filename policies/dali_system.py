"""DALI put together, with the greedy, the beam or the exact assignment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from policies.dali import BeamAssigner, GreedyAssigner, ResidualPrefetcher, WindowCache
from policies.exact_assignment import ExactAssigner
from policies.placements import RandomPlacement
from policies.protocols import Assigner, Composition, Needs
from policies.routers import TrueRouter
from policies.system import BuildContext, System, at_least

NEEDS = Needs(forecasts=(("residual", 1),))


class Sizes(NamedTuple):
    """Window and update of the cache, and how many experts to prefetch."""

    window: int
    update: int
    prefetch: int


FEW_EXPERTS = Sizes(4, 1, 1)  # Mixtral (Fig. 12)
MANY_EXPERTS = Sizes(4, 8, 4)  # DeepSeek-V2-Lite and Qwen3-30B (Fig. 12; Fig. 19 prefetches 8 for Qwen)


def default_sizes(context: BuildContext) -> Sizes:
    """The paper's sizes; a model that it does not have gets those of its nearest kin by number of experts."""
    return FEW_EXPERTS if context.experts < 32 else MANY_EXPERTS


@dataclass(frozen=True)
class DaliParameters:
    """Parameters of every DALI.

    window, update, prefetch: W, U and P. None: the paper's for the model (Fig. 12), that is 4, 1, 1 for Mixtral and
        others of fewer than 32 experts; 4, 8, 4 for DeepSeek, Qwen and the like.
    assigner: Algorithm 1 ("greedy"), the beam search of Appendix A.2, or the optimum of Eq. 3-9 ("exact").
    beam_width: the beam's B, 2 in the paper. solver: of the exact assignment; both find the same optimum.
    forecast: "residual" (Section 4.2); "gate" is HybriMoE's in Table 2.
    guard, stagger, early, evict: see WindowCache; the defaults are the text of Section 4.3.
    prefetch_slots: staging slots for prefetches. None: 2 P, so that the next layer's may come while this layer's are
        in use (the paper is silent).
    demand_slots: staging slots for loads, which the cache never admits (ours).
    """

    window: int | None = None
    update: int | None = None
    prefetch: int | None = None
    assigner: Literal["greedy", "beam", "exact"] = "greedy"
    beam_width: int = 2
    solver: Literal["own", "highs"] = "own"
    forecast: str = "residual"
    guard: bool = False
    stagger: bool = False
    early: bool = False
    evict: Literal["idlest", "busiest"] = "idlest"
    prefetch_slots: int | None = None
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Counts are not negative, windows not empty, and what is copied needs a slot."""
        at_least(self, window=1, update=0, prefetch=0, beam_width=1, prefetch_slots=1, demand_slots=1)


@dataclass(frozen=True)
class DaliIlpParameters(DaliParameters):
    """Those of DALI, with the exact assignment by default."""

    assigner: Literal["greedy", "beam", "exact"] = "exact"


@dataclass(frozen=True)
class DaliBeamParameters(DaliParameters):
    """Those of DALI, with the beam search by default."""

    assigner: Literal["greedy", "beam", "exact"] = "beam"


def build(parameters: DaliParameters, context: BuildContext, name: str = "dali") -> Composition:
    """DALI as evaluated in Section 6, unless parameters say otherwise."""
    sizes = _sizes(parameters, context)
    slots = 2 * sizes.prefetch if parameters.prefetch_slots is None else parameters.prefetch_slots
    return Composition(
        name=name,
        placement=RandomPlacement(context.seed),
        router=TrueRouter(),
        assigner=_assigner(parameters),
        prefetcher=ResidualPrefetcher(sizes.prefetch, parameters.forecast) if sizes.prefetch else None,
        cache=_cache(parameters, sizes, context),
        needs=Needs(forecasts=((parameters.forecast, 1),)) if sizes.prefetch else Needs(),
        demand_slots=parameters.demand_slots,
        prefetch_slots=slots if sizes.prefetch else 0,
        decision_cost=_decision_cost(parameters),
        parameters={**asdict(parameters), **sizes._asdict(), "prefetch_slots": slots},
    )


def build_ilp(parameters: DaliIlpParameters, context: BuildContext) -> Composition:
    """The same with the optimum of Eq. 3-9 in place of Algorithm 1."""
    return build(parameters, context, "dali-ilp")


def build_beam(parameters: DaliBeamParameters, context: BuildContext) -> Composition:
    """The same with the beam search of Appendix A.2."""
    return build(parameters, context, "dali-beam")


def _decision_cost(parameters: DaliParameters) -> str:
    """The assignment is what a decision costs: the exact one depends on its solver."""
    if parameters.assigner != "exact":
        return "dali-beam" if parameters.assigner == "beam" else "dali"
    return "dali-ilp@highs" if parameters.solver == "highs" else "dali-ilp"


def _sizes(parameters: DaliParameters, context: BuildContext) -> Sizes:
    chosen = {name: value for name in Sizes._fields if (value := getattr(parameters, name)) is not None}
    return default_sizes(context)._replace(**chosen)


def _assigner(parameters: DaliParameters) -> Assigner:
    if parameters.assigner == "exact":
        return ExactAssigner(parameters.solver)
    return BeamAssigner(parameters.beam_width) if parameters.assigner == "beam" else GreedyAssigner()


def _cache(parameters: DaliParameters, sizes: Sizes, context: BuildContext) -> WindowCache:
    return WindowCache(
        context.layers,
        context.experts,
        sizes.window,
        sizes.update,
        guard=parameters.guard,
        stagger=parameters.stagger,
        early=parameters.early,
        evict=parameters.evict,
    )


DALI = System(
    name="dali",
    summary="greedy CPU/GPU assignment, residual-based prefetching, workload-aware cache",
    source="DALI, Sections 4.1-4.3",
    parameters=DaliParameters,
    build=build,
    needs=NEEDS,
)
DALI_ILP = System(
    name="dali-ilp",
    summary="DALI with the exact assignment that its greedy one approximates",
    source="DALI, Section 4.1, Eq. 3-9",
    parameters=DaliIlpParameters,
    build=build_ilp,
    needs=NEEDS,
)
DALI_BEAM = System(
    name="dali-beam",
    summary="DALI with the beam search that it compares its greedy assignment with",
    source="DALI, Appendix A.2",
    parameters=DaliBeamParameters,
    build=build_beam,
    needs=NEEDS,
)
