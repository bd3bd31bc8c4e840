"""DALI's control for its prefetcher (Fig. 16a): Greedy Assignment with experts prefetched at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.papers.dali.assignment import GreedyAssigner
from policies.papers.dali.system import default_sizes
from policies.parts.caches import StaticCache
from policies.parts.forecasts import ProtectsNobody
from policies.parts.placements import RandomPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Composition
from policies.system import BuildContext, System, at_least


class RandomPrefetcher(ProtectsNobody):
    """``size`` experts of the next layer, drawn uniformly among those that are not on the GPU; no forecast is made."""

    into: Literal["cache", "staging"] = "staging"

    def __init__(self, experts: int, size: int, seed: int) -> None:
        self.experts, self.size = experts, size
        self._draw = random.Random(seed)

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Draw among the absent experts, without replacement."""
        layer = view.layer + 1
        resident, staged = view.residency.resident[layer], view.residency.staged[layer]
        absent = [expert for expert in range(self.experts) if expert not in resident and expert not in staged]
        chosen = self._draw.sample(absent, min(self.size, len(absent)))
        return [ExpertId(layer, expert) for expert in chosen]


@dataclass(frozen=True)
class RandomPrefetchParameters:
    """What DALI is compared with.

    prefetch: P. None: DALI's for the model (Fig. 12), 1 for Mixtral and the like, else 4; Fig. 16a itself has 2.
    prefetch_slots: staging slots for prefetches. None: 2 P, as DALI's (ours).
    demand_slots: staging slots for loads (ours).
    """

    prefetch: int | None = None
    prefetch_slots: int | None = None
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Something is prefetched, and what is copied needs a slot."""
        at_least(self, prefetch=1, prefetch_slots=1, demand_slots=1)


def build(parameters: RandomPrefetchParameters, context: BuildContext) -> Composition:
    """DALI's residents at random, which stay (the figure has no cache updates), its assignment, and no forecast."""
    size = default_sizes(context).prefetch if parameters.prefetch is None else parameters.prefetch
    slots = 2 * size if parameters.prefetch_slots is None else parameters.prefetch_slots
    return Composition(
        name="random-prefetch",
        placement=RandomPlacement(context.seed),
        router=TrueRouter(),
        assigner=GreedyAssigner(),
        prefetcher=RandomPrefetcher(context.experts, size, context.seed),
        cache=StaticCache(),
        demand_slots=parameters.demand_slots,
        prefetch_slots=slots,
        parameters={**asdict(parameters), "prefetch": size, "prefetch_slots": slots},
    )


RANDOM_PREFETCH = System(
    name="random-prefetch",
    summary="DALI's assignment, random prefetches, static cache",
    source='DALI, Section 6.3, Fig. 16a ("Random")',
    parameters=RandomPrefetchParameters,
    build=build,
)
