"""llama.cpp: whole layers' experts on the CPU or the GPU. As published they run where they are; in the released code a
large batch is worth copying them to the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.baselines.whole_layers import whole_layers
from policies.parts.assigners import FromTokens, LoadAll, ResidentOrCpu
from policies.protocols import Composition
from policies.system import BuildContext, Policy, register
from trilane.common.hints import Count


@register(
    "llama.cpp",
    "whole layers on the GPU, the last ones; nothing moves",
    source="llama.cpp --n-cpu-moe; DALI, Section 6.1; HybriMoE, Table I and Section VI-A",
)
@dataclass(frozen=True)
class LlamaCpp(Policy):
    """No parameters: the cache budget decides how many layers there are on the GPU (``--n-cpu-moe``)."""

    def compose(self, context: BuildContext) -> Composition:
        """Prefill and decode alike."""
        return whole_layers()


@register(
    "llama.cpp@impl",
    "from 32 tokens on, experts of CPU layers are copied",
    source="llama.cpp, ggml-backend.cpp (PR #15346) and --n-cpu-moe (PR #15077)",
)
@dataclass(frozen=True)
class LlamaCppImpl(Policy):
    """offload_min_tokens: from a step of so many tokens on, CPU layers run on the GPU (``GGML_OP_OFFLOAD_MIN_BATCH``,
    32; ik_llama.cpp takes 32 x experts / top_k instead).

    The used experts are copied one after another and each is computed before the next copy begins, as the code's one
    stream does: one staging slot. Nothing is kept. The code's copies come from pageable memory unless the host buffer
    is pinned; that is a property of the machine.
    """

    offload_min_tokens: Count = 32

    def compose(self, context: BuildContext) -> Composition:
        """The same placement; large steps go through one staging slot."""
        assigner = FromTokens(self.offload_min_tokens * context.top_k, LoadAll(), ResidentOrCpu())
        return replace(whole_layers(assigner, demand_slots=1), decision_cost="")
