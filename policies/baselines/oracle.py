"""The clairvoyant run: every part knows the future. A yardstick for the others, and not a bound on time per token:
each part is the best by its own measure (misses, the layer's makespan), and not all of them together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from policies.parts.belady import BeladyBypassCache
from policies.parts.exact_assignment import ExactAssigner
from policies.parts.future import Future
from policies.parts.placements import even_slots
from policies.parts.routers import TrueRouter
from policies.parts.top_prefetch import TopPrefetcher
from policies.protocols import Budget, Composition, InitialPlacement, Needs
from policies.system import BuildContext, System, at_least

NEEDS = Needs(forecasts=(("oracle", 1),), future=True)


class FuturePlacement:
    """Who is used first is there already: even slots, or one pool, filled in order of first use."""

    def __init__(self, future: Future, pool: bool = False) -> None:
        self._soonest = sorted(future.first_use, key=lambda expert: (future.first_use[expert], expert))
        self.pool = pool

    def place(self, budget: Budget) -> InitialPlacement:
        """Fill the slots of each layer, or the bytes of the pool."""
        residents: list[list[int]] = [[] for _ in range(budget.layers)]
        slots = [budget.experts] * budget.layers if self.pool else even_slots(budget)
        left = budget.cache_bytes
        for layer, expert in self._soonest:
            if len(residents[layer]) < slots[layer] and budget.expert_bytes[layer] <= left:
                residents[layer].append(expert)
                left -= budget.expert_bytes[layer]
        return InitialPlacement(None if self.pool else tuple(slots), tuple(tuple(sorted(r)) for r in residents))


@dataclass(frozen=True)
class OracleParameters:
    """All of it is ours.

    pool: one cache over all layers instead of even slots by layer.
    prefetch: how many of the next layer's absent experts to bring, 0 for none; None: all of them.
    into: where they go; in the cache they displace who is used again last.
    prefetch_slots, demand_slots: staging slots for what the cache declines.
    solver: of the exact assignment.
    """

    pool: bool = False
    prefetch: int | None = None
    into: Literal["cache", "staging"] = "cache"
    prefetch_slots: int = 4
    demand_slots: int = 2
    solver: Literal["own", "highs"] = "own"

    def __post_init__(self) -> None:
        """Counts are not negative, and loads need a slot."""
        at_least(self, prefetch=0, prefetch_slots=0, demand_slots=1)


def build(parameters: OracleParameters, context: BuildContext) -> Composition:
    """Clairvoyant placement, prefetches and cache; exact assignment."""
    future = context.required_future("oracle")
    size = context.experts if parameters.prefetch is None else parameters.prefetch
    return Composition(
        name="oracle",
        placement=FuturePlacement(future, parameters.pool),
        router=TrueRouter(),
        assigner=ExactAssigner(parameters.solver),
        prefetcher=TopPrefetcher(size, "oracle", parameters.into, guard=False) if size else None,
        cache=BeladyBypassCache(future),
        needs=NEEDS,
        demand_slots=parameters.demand_slots,
        prefetch_slots=parameters.prefetch_slots,
        parameters=asdict(parameters),
    )


ORACLE = System(
    name="oracle",
    summary="perfect forecasts, Belady with bypass, exact assignment",
    source="ours; Belady 1966 for the cache",
    parameters=OracleParameters,
    build=build,
    needs=NEEDS,
)
