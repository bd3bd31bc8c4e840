"""DeepSpeed (ZeRO-Inference, as DeepSpeed-MII): layers are streamed through the GPU one after another, all of their
experts, whether a token needs them or not, and the next layer's are on their way meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from policies.assigners import settle
from policies.caches import StaticCache
from policies.placements import NoPlacement
from policies.protocols import Assigner, Composition, Needs
from policies.routers import TrueRouter
from policies.system import BuildContext, System, at_least
from policies.views import Assignment, ExpertId, Forecast, LayerView

NEEDS = Needs(gpu_only=True)


@dataclass(frozen=True)
class DeepSpeedParameters:
    """The design is for dense models; that a layer has experts is lost on it. There is no cache at all.

    prefetch: bring the next layer ahead. Layer 0 of a step never is.
    prefetch_slots: staging slots for the next layer. None: one for each of its experts.
    demand_slots: staging slots for what has not been brought ahead; 2 let one copy run while another is computed
        (ours).
    """

    prefetch: bool = True
    prefetch_slots: int | None = None
    demand_slots: int = 2

    def __post_init__(self) -> None:
        """What is copied needs a slot."""
        at_least(self, prefetch_slots=1, demand_slots=1)


class StreamLayer:
    """All active experts on the GPU, and the others of the layer copied before them for nothing."""

    def __init__(self, experts: int) -> None:
        self._experts = range(experts)

    def assign(self, view: LayerView) -> Assignment:
        """Load what is active, stream the rest (what has come ahead, the session leaves out)."""
        active = view.ready_ns
        idle = tuple(expert for expert in self._experts if expert not in active)
        return settle(view, [True] * len(view.routing.active))._replace(streamed=idle)


class NextLayer:
    """All experts of the next layer, in id order."""

    into: Literal["cache", "staging"] = "staging"

    def __init__(self, layers: int, experts: int) -> None:
        self._ids = [[ExpertId(layer, expert) for expert in range(experts)] for layer in range(layers)]

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], assigner: Assigner) -> Sequence[ExpertId]:
        """As they come; nothing is forecast."""
        return self._ids[view.layer + 1]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """Nobody."""
        return frozenset()


def build(parameters: DeepSpeedParameters, context: BuildContext) -> Composition:
    """Streaming without a cache: whatever the memory beside the staging slots, it stays empty."""
    slots = context.experts if parameters.prefetch_slots is None else parameters.prefetch_slots
    return Composition(
        name="deepspeed",
        placement=NoPlacement(),
        router=TrueRouter(),
        assigner=StreamLayer(context.experts),
        prefetcher=NextLayer(context.layers, context.experts) if parameters.prefetch else None,
        cache=StaticCache(),
        needs=NEEDS,
        demand_slots=parameters.demand_slots,
        prefetch_slots=slots if parameters.prefetch else 0,
        parameters={**asdict(parameters), "prefetch_slots": slots},
    )


DEEPSPEED = System(
    name="deepspeed",
    summary="every layer is streamed to the GPU whole, the next one ahead; no cache",
    source="DAOP, Section V (DeepSpeed-MII, baseline); HybriMoE, Section II-B",
    parameters=DeepSpeedParameters,
    build=build,
    needs=NEEDS,
)
