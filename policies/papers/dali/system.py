"""DALI put together, with the greedy, the beam or the exact assignment."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

from policies.papers.dali.assignment import BeamAssigner, GreedyAssigner, WindowCache
from policies.parts.exact_assignment import ExactAssigner
from policies.parts.placements import RandomPlacement
from policies.parts.routers import TrueRouter
from policies.parts.top_prefetch import TopPrefetcher
from policies.protocols import Assigner, Composition, Needs
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
class _Common:
    """What every DALI has, whoever assigns.

    window, update, prefetch: W, U and P. None: the paper's for the model (Fig. 12), that is 4, 1, 1 for Mixtral and
        others of fewer than 32 experts; 4, 8, 4 for DeepSeek, Qwen and the like. Every ``window`` steps the ``update``
        busiest absent experts of a layer replace as many residents; ``prefetch`` experts are brought for the next one,
        all of them absent: that residents count among the P is not offered (the paper is silent).
    forecast: "residual" (Section 4.2); "gate" is HybriMoE's in Table 2, the same with a residual of zero; "statistical"
        is EdgeMoE's there, by past frequency, which no bundled trace holds.
    evict: who leaves, the "idlest" residents (text of Section 4.3) or the "busiest" (line 11 of Algorithm 2, as
        printed). early: swap after the first step already, as line 9 has it.
    guard: swap only where the incoming expert was the busier one (ours). stagger: layer l is due l steps earlier, so
        that not all layers flood the link at once (ours).
    prefetch_slots: staging slots for prefetches. None: 2 P, so that the next layer's may come while this layer's are
        in use (the paper is silent).
    demand_slots: staging slots for loads, which the cache never admits (ours).
    """

    window: int | None = None
    update: int | None = None
    prefetch: int | None = None
    forecast: Literal["residual", "gate", "statistical"] = "residual"
    guard: bool = False
    stagger: bool = False
    early: bool = False
    evict: Literal["idlest", "busiest"] = "idlest"
    prefetch_slots: int | None = None
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Counts are not negative, windows not empty, and what is copied needs a slot."""
        at_least(self, window=1, update=0, prefetch=0, prefetch_slots=1, demand_slots=1)


@dataclass(frozen=True)
class DaliIlpParameters(_Common):
    """The exact assignment. The paper names no solver, and reports that it takes 55 % of the inference time; ours takes
    far less, so that the exact assignment is charged less here than there.

    solver: "own", or "highs", a general one that is slow, as the paper's may have been; both find the same optimum.
    """

    solver: Literal["own", "highs"] = "own"


@dataclass(frozen=True)
class DaliBeamParameters(_Common):
    """The beam search.

    beam_width: the beam's B, 2 in the paper.
    """

    beam_width: int = 2

    def __post_init__(self) -> None:
        """Somebody is kept."""
        super().__post_init__()
        at_least(self, beam_width=1)


@dataclass(frozen=True)
class DaliParameters(DaliIlpParameters, DaliBeamParameters):
    """Any of the three assignments.

    assigner: Algorithm 1 ("greedy"), the beam search of Appendix A.2, or the optimum of Eq. 3-9 ("exact").
    """

    assigner: Literal["greedy", "beam", "exact"] = "greedy"


def build(parameters: DaliParameters, context: BuildContext) -> Composition:
    """DALI as evaluated in Section 6, unless parameters say otherwise."""
    if parameters.assigner == "exact":
        return replace(build_ilp(parameters, context), name="dali")
    if parameters.assigner == "beam":
        return replace(build_beam(parameters, context), name="dali")
    return _compose("dali", parameters, GreedyAssigner(), context)


def build_ilp(parameters: DaliIlpParameters, context: BuildContext) -> Composition:
    """The same with the optimum of Eq. 3-9 in place of Algorithm 1, which costs what its solver does."""
    cost = "dali-ilp@highs" if parameters.solver == "highs" else "dali-ilp"
    return replace(_compose("dali-ilp", parameters, ExactAssigner(parameters.solver), context), decision_cost=cost)


def build_beam(parameters: DaliBeamParameters, context: BuildContext) -> Composition:
    """The same with the beam search of Appendix A.2."""
    return _compose("dali-beam", parameters, BeamAssigner(parameters.beam_width), context)


def _compose(name: str, parameters: _Common, assigner: Assigner, context: BuildContext) -> Composition:
    sizes = _sizes(parameters, context)
    slots = 2 * sizes.prefetch if parameters.prefetch_slots is None else parameters.prefetch_slots
    return Composition(
        name=name,
        placement=RandomPlacement(context.seed),
        router=TrueRouter(),
        assigner=assigner,
        prefetcher=_prefetcher(parameters, sizes.prefetch),
        cache=_cache(parameters, sizes, context),
        needs=Needs(forecasts=((parameters.forecast, 1),)) if sizes.prefetch else Needs(),
        demand_slots=parameters.demand_slots,
        prefetch_slots=slots if sizes.prefetch else 0,
        decision_cost=name,
        parameters={**asdict(parameters), **sizes._asdict(), "prefetch_slots": slots},
    )


def _prefetcher(parameters: _Common, size: int) -> TopPrefetcher | None:
    """Section 4.2: of the next layer's experts that are not on the GPU, the P with most forecast workload.

    The paper does not say whether residents count among the P: here they do not, since they need no copy.
    """
    return TopPrefetcher(size, parameters.forecast, "staging") if size else None


def _sizes(parameters: _Common, context: BuildContext) -> Sizes:
    chosen = {name: value for name in Sizes._fields if (value := getattr(parameters, name)) is not None}
    return default_sizes(context)._replace(**chosen)


def _cache(parameters: _Common, sizes: Sizes, context: BuildContext) -> WindowCache:
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
    summary="greedy assignment, residual prefetching, window cache",
    source="DALI, Sections 4.1-4.3",
    parameters=DaliParameters,
    build=build,
    needs=NEEDS,
)
DALI_ILP = System(
    name="dali-ilp",
    summary="DALI with the exact assignment",
    source="DALI, Section 4.1, Eq. 3-9",
    parameters=DaliIlpParameters,
    build=build_ilp,
    needs=NEEDS,
)
DALI_BEAM = System(
    name="dali-beam",
    summary="DALI with the beam search",
    source="DALI, Appendix A.2",
    parameters=DaliBeamParameters,
    build=build_beam,
    needs=NEEDS,
)
