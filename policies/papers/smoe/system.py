"""SMoE put together: substitution, score-window cache, prefetches from a partial forward pass, two-pointer split."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from policies.papers.smoe.prefetcher import TopScorePrefetcher
from policies.papers.smoe.router import CacheRouter
from policies.papers.smoe.score_window import ScoreWindowCache
from policies.papers.smoe.two_pointer import TwoPointer
from policies.parts.placements import RandomPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Composition, Needs, Router
from policies.system import BuildContext, System, at_least, shares

FORECASTS = (("partial", 1),)
NEEDS = Needs(scores=True, tokens=True, forecasts=FORECASTS, changes_routing=True)


@dataclass(frozen=True)
class SmoeParameters:
    """Parameters of SMoE. The paper starts from a GPU that holds some experts and does not say which: here even slots,
    filled at random.

    alpha: substitution threshold, 0 to 1; 0 keeps the model's routing. The paper uses 0.35, 0.30 and 0.25 (S1-S3,
        Section VI-B); the default is the least, that of its largest model (Qwen2-57B, S3).
    listing: Algorithm 1 as printed instead of the text: one pass, so that a token sees the top-score experts of the
        tokens before it only; and low-score experts on the GPU are exchanged too.
    window: steps that the cache averages over; not published, ours.
    assigner: Algorithm 2 as printed ("two_pointer"), or with the objective of Eq. 4 ("two_pointer_min").
    history: CPU experts that C_cpu is the mean of; not published, ours.
    prefetch: bring forecast top-score experts (Section IV-C); off: the "+CR" of Fig. 14 with CPU-assisted scheduling.
    demand_slots: staging slots for loads that find no room in the cache (ours).
    """

    alpha: float = 0.25
    listing: bool = False
    window: int = 16
    assigner: Literal["two_pointer", "two_pointer_min"] = "two_pointer"
    history: int = 32
    prefetch: bool = True
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """A share is one, windows are not empty, and what is copied needs a slot."""
        shares(self, "alpha")
        at_least(self, window=1, history=1, demand_slots=1)


def build(parameters: SmoeParameters, context: BuildContext) -> Composition:
    """SMoE as evaluated in Section VI, unless parameters say otherwise."""
    alpha = parameters.alpha
    router: Router = CacheRouter(alpha, parameters.listing, context.norm_topk) if alpha else TrueRouter()
    return Composition(
        name="smoe",
        placement=RandomPlacement(context.seed),
        router=router,
        assigner=TwoPointer(parameters.history, sooner=parameters.assigner == "two_pointer_min"),
        prefetcher=TopScorePrefetcher(alpha) if parameters.prefetch else None,
        cache=ScoreWindowCache(context.layers, context.experts, parameters.window),
        needs=Needs(
            scores=True,
            tokens=True,
            forecasts=FORECASTS if parameters.prefetch else (),
            changes_routing=alpha > 0,
        ),
        demand_slots=parameters.demand_slots,
        parameters=asdict(parameters),
    )


SMOE = System(
    name="smoe",
    summary="resident experts replace low-score ones; two pointers",
    source="SMoE, Sections IV-V",
    parameters=SmoeParameters,
    build=build,
    needs=NEEDS,
)
