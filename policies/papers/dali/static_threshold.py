"""The static threshold that DALI takes HybriMoE for (DALI, Section 6.1): the workload alone decides on GPU or CPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from policies.papers.dali.system import default_sizes
from policies.papers.hybrimoe.mrs import MrsCache
from policies.parts.assigners import ThresholdAssigner, break_even
from policies.parts.placements import PopularityPlacement
from policies.parts.routers import TrueRouter
from policies.parts.top_prefetch import TopPrefetcher
from policies.protocols import Composition, Needs
from policies.system import BuildContext, System, at_least, shares

NEEDS = Needs(scores=True, forecasts=(("gate", 1),), calibration=True)


@dataclass(frozen=True)
class StaticThresholdParameters:
    """DALI names the parts, and no number.

    theta: the threshold, in tokens. None: each layer's break-even by the planner's costs (ours).
    residents: "stay" asks only absent experts (the baseline's row speaks of these); "split" sends residents of small
        workload to the CPU as well.
    uniform: even slots in every layer, instead of the most popular experts of the whole model as in Fiddler.
    prefetch: how many experts of the next layer to bring. None: as many as DALI, 1 below 32 experts and 4 from there.
    alpha, keep: of the MRS cache; keep None: twice the model's top-k.
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    theta: int | None = None
    residents: Literal["stay", "split"] = "stay"
    uniform: bool = False
    prefetch: int | None = None
    alpha: float = 0.3
    keep: int | None = None
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """Counts are not negative, a share is one, and loads need a slot."""
        at_least(self, theta=0, prefetch=0, keep=1, demand_slots=1)
        shares(self, "alpha")


def build(parameters: StaticThresholdParameters, context: BuildContext) -> Composition:
    """Popular experts at first, MRS from then on."""
    prefetch = default_sizes(context).prefetch if parameters.prefetch is None else parameters.prefetch
    keep = parameters.keep or 2 * context.top_k
    forecasts = NEEDS.forecasts if prefetch else ()
    return Composition(
        name="static-threshold",
        placement=PopularityPlacement(parameters.uniform),
        router=TrueRouter(),
        assigner=ThresholdAssigner(parameters.theta, parameters.residents),
        prefetcher=TopPrefetcher(prefetch, "gate", "cache") if prefetch else None,
        cache=MrsCache(context.layers, context.experts, keep, parameters.alpha),
        needs=Needs(scores=True, forecasts=forecasts, calibration=True),
        demand_slots=parameters.demand_slots,
        parameters={**asdict(parameters), "theta": _resolved(parameters, context), "prefetch": prefetch, "keep": keep},
    )


def _resolved(parameters: StaticThresholdParameters, context: BuildContext) -> object:
    """The threshold, by layer where layers differ; None if neither it nor the planner's costs are given."""
    if parameters.theta is not None or not context.costs:
        return parameters.theta
    by_layer = [break_even(costs) for costs in context.costs]
    return by_layer[0] if len(set(by_layer)) == 1 else by_layer


STATIC_THRESHOLD = System(
    name="static-threshold",
    summary="busy experts on the GPU; next-gate prefetching; MRS",
    source="DALI, Section 6.1 (its description of HybriMoE); HybriMoE, Section IV-D for the cache",
    parameters=StaticThresholdParameters,
    build=build,
    needs=NEEDS,
)
