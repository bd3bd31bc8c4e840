"""Strata: experts by profile on the GPU, with adaptive swaps; a share of those that miss crosses the link, the CPU
computes the others next to it (Niko1221/Strata, engines 0.1.37 to 0.1.42; docs/readings.md#strata)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from policies.mechanism.views import ExpertCosts, LayerView, Routing
from policies.parts.adaptive_tier import AdaptiveTier
from policies.parts.assigners import FromTokens, LoadAll
from policies.parts.miss_share import MissShare, SettledShare, SoonerShare
from policies.parts.placements import PopularityPlacement
from policies.parts.routers import TrueRouter, routing_of_tokens
from policies.protocols import Assigner, Composition, Needs
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count, Share, above, at_least, at_most, between

BASE_SHARE, FULL_BYTES_PER_NS = 0.55, 20.0  # of missed experts, on links of 20 GB/s and more (release 0.1.37)
PROBED_STEPS = 8  # decode steps in which "auto" looks at the machine (ours; the release says "the first windows")
SOURCE = "Niko1221/Strata (MIT), src/core/expert_source.cpp and adaptive_tier.cpp at 0.1.39, releases 0.1.37, 0.1.42"


@register("strata", "by profile, with swaps; some misses cross the link, the CPU has the rest", source=SOURCE)
@dataclass(frozen=True)
class Strata(Policy):
    """The GPU holds the experts that calibration prompts used most, of all layers together, and computes them. Of a
    layer's missed experts a share is copied, computed and not kept; the CPU computes the others meanwhile.

    pcie_share: of a layer's missed experts, rounded down (``--pcie-frac``); "auto" finds one share for the machine in
        the first decode steps, as the engine does at its start since 0.1.42; "sooner" decides in each layer, by the
        planner's costs.
    most_copies: of a layer (``kStagingBlobs``).
    every, swaps, decay: after so many steps, at most so many swaps, then counts of uses are multiplied by the decay
        (``--adapt-every``, ``--adapt-swaps``, ``--adapt-decay``). swaps 0: the cache stays as it is.
    awaits_swaps: a step waits for the copies of all swaps, as in the engine (generate.cpp, apply_pending);
        without it they run during the next steps, as with a fork's ``STRATA_ADAPT_NOWAIT``.
    stream_from_tokens: of a step, from which on all missed experts are copied, as in a prompt (estimate; shorter
        prompts are read through windows, ``--short-read``).

    Inferred: the formula of "auto" is ours (two of the engine's shares are public), as are the steps that it looks at;
    that an expert whose swap is under way is computed by the CPU; that prompts do not count as uses. Copied are the
    missed experts with the fewest tokens; the engine copies those that the window chose last, which have fewer, too.
    What the cache lends to prompts, and partly pinned memory, are left out.
    """

    needs = Needs(calibration=True)

    pcie_share: Share | Literal["auto", "sooner"] = "auto"
    most_copies: Count = 16
    every: Count = 4
    swaps: Annotated[int, at_least(0)] = 96
    decay: Annotated[float, above(0), at_most(1)] = 0.7
    awaits_swaps: bool = True
    stream_from_tokens: Count = 64

    def compose(self, context: BuildContext) -> Composition:
        tier = AdaptiveTier(self.every, self.swaps, self.decay, least=2, margin=1.5)
        return Composition(
            placement=PopularityPlacement(),
            assigner=FromTokens(self.stream_from_tokens * context.top_k, LoadAll(), self._share(context.costs)),
            cache=tier,
            awaits_swaps=self.awaits_swaps,
            demand_slots=self.most_copies,
            decision_cost="fiddler",
        )

    def _share(self, costs: Sequence[ExpertCosts]) -> Assigner:
        if self.pcie_share == "sooner":
            return SoonerShare(self.most_copies)
        if self.pcie_share == "auto":
            return SettledShare(share_of_link(costs), self.most_copies, PROBED_STEPS)
        return MissShare(float(self.pcie_share), self.most_copies)


def share_of_link(costs: Sequence[ExpertCosts]) -> float:
    """The share of engines 0.1.37 to 0.1.41: less on links below 20 GB/s, in proportion."""
    size_bytes, copy_ns = (sum(getattr(expert, name) for expert in costs) for name in ("expert_bytes", "copy_ns"))
    return BASE_SHARE * min(1.0, size_bytes / copy_ns / FULL_BYTES_PER_NS) if copy_ns else BASE_SHARE


class TailSkip(TrueRouter):
    """In decode, missed experts that no token of the step ranks above ``rank`` (from 0) are left out. The weights of
    the others stay as they are."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def route(self, view: LayerView) -> Routing:
        """The routing in force; ``view.routing`` itself if nothing is left out. Needs tokens."""
        routing = view.routing
        if view.phase != "decode":
            return routing
        kept = {expert for ids in routing.token_ids for expert in ids[: self._rank]}
        gone = {expert for expert in routing.active if view.ready_ns[expert] and expert not in kept}
        if not gone:
            return routing
        pairs = [
            [(expert, weight) for expert, weight in zip(ids, weights, strict=True) if expert not in gone]
            for ids, weights in zip(routing.token_ids, routing.token_weights, strict=True)
        ]
        ids = [[expert for expert, _ in token] for token in pairs]
        return routing_of_tokens(ids, [[weight for _, weight in token] for token in pairs])


@register(
    "strata@tail-skip",
    "strata, without missed experts that every token ranks low",
    source="Niko1221/Strata, STRATA_ROUTE_TAIL_SKIP: on in 0.1.42, off since app 0.2.17, as quality suffers",
)
@dataclass(frozen=True)
class StrataTailSkip(Strata):
    """``strata`` with the tail skip: a missed expert that every token of the step which chose it ranks ``tail_rank`` or
    lower is neither copied nor computed, and the other weights are not scaled up. That changes the output.

    tail_rank: from 0, at least 1 (``STRATA_ROUTE_TAIL_SKIP``). Whether the engine counts from 0 or from 1 is not
        public; a fork counts from 0.

    The other parameters, and what is inferred, are those of ``strata``.
    """

    needs = Needs(calibration=True, tokens=True, changes_routing=True, max_batch=1)

    tail_rank: Annotated[int, between(1, 64)] = 7

    def compose(self, context: BuildContext) -> Composition:
        """Compose as ``strata``, with another router."""
        return replace(super().compose(context), router=TailSkip(self.tail_rank))
