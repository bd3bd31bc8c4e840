"""DeepSpeed (ZeRO-Inference, as DeepSpeed-MII): all experts of one layer after another are streamed through the GPU,
whether a token needs them or not, while the next layer's are being copied."""

from __future__ import annotations

from dataclasses import dataclass

from policies.baselines.static import streamed_layers
from policies.parts.placements import LayerWisePlacement, NoPlacement
from policies.protocols import Composition, Needs
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count


@register(
    "deepspeed",
    "whole layers are streamed, one ahead; no cache",
    source="DAOP, Section V (DeepSpeed-MII, baseline); HybriMoE, Section II-B",
)
@dataclass(frozen=True)
class DeepSpeed(Policy):
    """The design is for dense models and makes no use of the fact that a layer has experts. Nothing that is copied is
    kept.

    resident: whether as many whole layers as fit stay on the GPU. In ZeRO-3 weights stay that are used again within
        ``stage3_max_reuse_distance``, as long as ``stage3_max_live_parameters`` are not exceeded: by default 1e9 each,
        so that none of a large model's do.
    prefetch: copy the next layer ahead. Layer 0 of a step is never prefetched.
    prefetch_slots: staging slots for the next layer. None: one for each of its experts.
    demand_slots: staging slots for what has not been prefetched; 2 let one copy run while another is computed
        (ours).
    """

    needs = Needs(gpu_only=True)

    resident: bool = False
    prefetch: bool = True
    prefetch_slots: Count | None = None
    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        """Streaming without a cache: memory other than the staging slots stays empty, or holds layers for good."""
        placement = LayerWisePlacement() if self.resident else NoPlacement()
        return streamed_layers(context, placement, self.demand_slots, self.prefetch_slots, self.prefetch)
