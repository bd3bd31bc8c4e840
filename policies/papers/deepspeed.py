"""DeepSpeed (ZeRO-Inference, as DeepSpeed-MII): layers are streamed through the GPU one after another, all of their
experts, whether a token needs them or not, and the next layer's are on their way meanwhile."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from policies.parts.caches import StaticCache
from policies.parts.layer_streaming import NextLayer, StreamLayer
from policies.parts.placements import NoPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Composition, Needs
from policies.system import BuildContext, System, at_least

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
    summary="whole layers are streamed, one ahead; no cache",
    source="DAOP, Section V (DeepSpeed-MII, baseline); HybriMoE, Section II-B",
    parameters=DeepSpeedParameters,
    build=build,
    needs=NEEDS,
)
