"""DALI, with the greedy, the beam or the exact assignment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from policies.papers.dali.parts import BeamAssigner, GreedyAssigner, WindowCache
from policies.parts.exact_assignment import ExactAssigner
from policies.parts.placements import RandomPlacement
from policies.parts.prefetchers import TopPrefetcher
from policies.protocols import Assigner, Composition, Needs
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count


class DaliSizes(NamedTuple):
    """Window and update of the cache, and how many experts to prefetch."""

    window: int
    update: int
    prefetch: int


FEW_EXPERTS = DaliSizes(4, 1, 1)  # Mixtral (Fig. 12)
MANY_EXPERTS = DaliSizes(4, 8, 4)  # DeepSeek-V2-Lite and Qwen3-30B (Fig. 12; Fig. 19 prefetches 8 for Qwen)


def default_sizes(context: BuildContext) -> DaliSizes:
    """The paper's sizes; another model has those of the paper's model with a similar number of experts."""
    return FEW_EXPERTS if context.experts < 32 else MANY_EXPERTS


@dataclass(frozen=True)
class _Common(Policy):
    """Parameters of every DALI, whatever the assigner.

    window, update, prefetch: W, U and P. None: the paper's for the model (Fig. 12), that is 4, 1, 1 for Mixtral and
        others of fewer than 32 experts; 4, 8, 4 for DeepSeek, Qwen and the like. Every ``window`` steps the ``update``
        busiest absent experts of a layer replace as many residents; ``prefetch`` experts are copied for the next one.
    among: the P with most forecast workload are chosen among "all" experts of the next layer, of which the absent ones
        are copied (as the words of Section 4.2 may mean), or among those that are "absent".
    forecast: "residual" (Section 4.2); "gate" is HybriMoE's in Table 2, the same with a residual of zero; "statistical"
        is EdgeMoE's there, by past frequency, which no bundled trace holds.
    evict: which residents are replaced, the "idlest" (text of Section 4.3) or the "busiest" (line 11 of Algorithm 2, as
        printed). early: swap after the first step already, as line 9 has it.
    guard: swap only where the incoming expert was the busier one (ours). stagger: layer l is due l steps earlier, so
        that not all layers flood the link at once (ours).
    admits: which demand loads stay in the cache: "none", or all of them ("free"), each in the slot of the resident with
        the fewest tokens in the window (the paper is silent; Algorithm 2 knows swaps alone).
    prefetch_slots: staging slots for prefetches. None: 2 P, so that the next layer's may be copied while this layer's
        are in use (the paper is silent).
    demand_slots: staging slots for loads that the cache does not admit (ours).
    """

    window: Count | None = None
    update: NonNegative | None = None
    prefetch: NonNegative | None = None
    forecast: Literal["residual", "gate", "statistical"] = "residual"
    guard: bool = False
    stagger: bool = False
    early: bool = False
    evict: Literal["idlest", "busiest"] = "idlest"
    among: Literal["absent", "all"] = "absent"
    admits: Literal["none", "free"] = "none"
    prefetch_slots: Count | None = None
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        """A forecast, unless nothing is prefetched."""
        return Needs() if self.prefetch == 0 else Needs(forecasts=((self.forecast, 1),))

    def _with(self, assigner: Assigner, context: BuildContext) -> Composition:
        sizes = self._sizes(context)
        slots = 2 * sizes.prefetch if self.prefetch_slots is None else self.prefetch_slots
        return Composition(
            placement=RandomPlacement(context.seed),
            assigner=assigner,
            prefetcher=self._prefetcher(sizes.prefetch),
            cache=self._cache(sizes, context),
            demand_slots=self.demand_slots,
            prefetch_slots=slots if sizes.prefetch else 0,
            parameters={**sizes._asdict(), "prefetch_slots": slots},
        )

    def _prefetcher(self, size: int) -> TopPrefetcher | None:
        """Section 4.2: the P experts of the next layer with most forecast workload."""
        return TopPrefetcher(size, self.forecast, "staging", among=self.among) if size else None

    def _sizes(self, context: BuildContext) -> DaliSizes:
        chosen = {name: value for name in DaliSizes._fields if (value := getattr(self, name)) is not None}
        return default_sizes(context)._replace(**chosen)

    def _cache(self, sizes: DaliSizes, context: BuildContext) -> WindowCache:
        return WindowCache(
            context.layers, context.experts, sizes.window, sizes.update,
            guard=self.guard, stagger=self.stagger, early=self.early, evict=self.evict,
            admits=self.admits == "free",
        )


@dataclass(frozen=True)
class _WithExact(_Common):
    """The exact assignment. The paper names no solver, and reports that it takes 55 % of the inference time; ours takes
    far less, so that the exact assignment is charged less here than there.

    solver: "own", or "highs", a general one that is slow, as the paper's may have been; both find the same optimum.
    """

    solver: Literal["own", "highs"] = "own"

    def _exact(self, context: BuildContext) -> Composition:
        """The optimum of Eq. 3-9 in place of Algorithm 1; the decision costs what its solver costs."""
        cost = "dali-ilp@highs" if self.solver == "highs" else "dali-ilp"
        return replace(self._with(ExactAssigner(self.solver), context), decision_cost=cost)


@dataclass(frozen=True)
class _WithBeam(_Common):
    """The beam search.

    beam_width: the beam's B, 2 in the paper.
    """

    beam_width: Count = 2

    def _beam(self, context: BuildContext) -> Composition:
        """The beam search of Appendix A.2 in place of Algorithm 1."""
        return replace(self._with(BeamAssigner(self.beam_width), context), decision_cost="dali-beam")


@register("dali", "greedy assignment, residual prefetching, window cache", source="DALI, Sections 4.1-4.3")
@dataclass(frozen=True)
class Dali(_WithExact, _WithBeam):
    """Any of the three assignments.

    assigner: Algorithm 1 ("greedy"), the beam search of Appendix A.2, or the optimum of Eq. 3-9 ("exact").
    """

    assigner: Literal["greedy", "beam", "exact"] = "greedy"

    def compose(self, context: BuildContext) -> Composition:
        """DALI as evaluated in Section 6, unless parameters say otherwise."""
        if self.assigner == "exact":
            return self._exact(context)
        return self._beam(context) if self.assigner == "beam" else self._with(GreedyAssigner(), context)


@register("dali-ilp", "DALI with the exact assignment", source="DALI, Section 4.1, Eq. 3-9")
class DaliIlp(_WithExact):
    def compose(self, context: BuildContext) -> Composition:
        """The optimum."""
        return self._exact(context)


@register("dali-beam", "DALI with the beam search", source="DALI, Appendix A.2")
class DaliBeam(_WithBeam):
    def compose(self, context: BuildContext) -> Composition:
        """The beam."""
        return self._beam(context)
