"""llama.cpp: whole layers' experts on the CPU or the GPU. As published they run where they are; in the released code a
large batch is worth copying them to the GPU. And its cache of experts (``--moe-cache-mib``): an LRU pool on the GPU for
the experts that the host keeps, whose misses are uploaded and waited for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.baselines.whole_layers import whole_layers
from policies.mechanism.views import Assignment, ExpertId, LayerView
from policies.parts.assigners import FromTokens, LoadAll, ResidentOrCpu, settle
from policies.parts.caches import LruCache
from policies.protocols import Budget, Composition, InitialPlacement
from policies.system import BuildContext, NonNegative, Policy, register
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


class HostLayersPool:
    """The experts of the layers from ``host_layers`` on are on the GPU; what is left is one empty pool for the others.

    It serves steps of few tokens, up to ``most_tokens``, whose experts, ``top_k`` of each, it has room for. ``slots``:
    of the pool, known once experts are placed.
    """

    def __init__(self, host_layers: int, top_k: int, most_tokens: int) -> None:
        self.host_layers, self._top_k, self._most_tokens = host_layers, top_k, most_tokens
        self.slots = self._experts = 0

    def place(self, budget: Budget) -> InitialPlacement:
        """Whole layers from ``host_layers`` on."""
        sizes, everyone, self._experts = budget.expert_bytes, tuple(range(budget.experts)), budget.experts
        pool = budget.cache_bytes - budget.experts * sum(sizes[self.host_layers :])
        self.slots = max(pool, 0) // max(sizes[: self.host_layers], default=1)
        return InitialPlacement(None, tuple(everyone if i >= self.host_layers else () for i in range(budget.layers)))

    def tokens(self, view: LayerView) -> int:
        """Tokens of the step."""
        return sum(view.routing.tokens) // self._top_k

    def serves(self, view: LayerView) -> bool:
        """Whether the layer's experts come from the pool, whatever the step's tokens may choose."""
        tokens = self.tokens(view)
        return tokens <= self._most_tokens and min(tokens * self._top_k, self._experts) <= self.slots


class HostLayersLru(LruCache):
    """LRU over the host's experts. Other steps read it, and leave it as it is."""

    def __init__(self, pool: HostLayersPool) -> None:
        super().__init__()
        self._pool = pool

    def observe(self, view: LayerView) -> None:
        """A step that does not use the pool neither counts as a use nor is admitted."""
        self.admits = self._pool.serves(view)
        if self.admits:
            super().observe(view)

    def admitted(self, key: ExpertId, group: int) -> None:
        """Experts of the GPU's own layers are not part of the pool, and never leave."""
        if key.layer < self._pool.host_layers:
            super().admitted(key, group)


class FromPool:
    """All on the GPU where the step uses the pool, and where it is large enough to be worth copying its experts."""

    def __init__(self, pool: HostLayersPool, offload_min_tokens: int) -> None:
        self.pool, self.offload_min_tokens = pool, offload_min_tokens

    def assign(self, view: LayerView) -> Assignment:
        """Small steps for which the pool has no room are computed where the host keeps the experts."""
        pool = self.pool
        own = view.layer >= pool.host_layers
        on_gpu = own or pool.serves(view) or pool.tokens(view) >= self.offload_min_tokens
        return settle(view, [on_gpu] * len(view.routing.active))


@register(
    "llama.cpp@cache",
    "LRU of the host's experts; misses are uploaded",
    source="llama.cpp, src/llama-moe-cache.cpp at 4b060f2 (PR 29887, from build 11480 on); docs/readings.md#llamacpp",
)
@dataclass(frozen=True)
class LlamaCppCache(Policy):
    """``--moe-cache-mib`` takes what the layers that are wholly on the GPU leave of the cache budget.

    host_layers: N of ``--n-cpu-moe``, the first layers, whose experts the host keeps; None: all of them
        (``--cpu-moe``).
    most_tokens: of a step that uses the cache (``max_batch``, 32; its statistics, not its decisions, tell steps of up
        to 8 tokens from others).
    offload_min_tokens: as ``llama.cpp@impl``; such steps copy what the cache holds from there, and leave it as it is.

    Missing experts are uploaded before the layer's kernels start, in one stream: one staging slot. The code gives each
    kind of layer (types and shapes of its tensors) a pool of its own, in proportion to its bytes, and each pool a spare
    slot; here one pool of bytes serves all of them. It refuses a cache without room for the experts of one token; here
    these are then computed on the CPU.

    The host time of a decision is that of this project's own program, of the policy that is nearest to this one
    (``mixtral-offloading@impl``, an LRU cache whose misses are copied): that of llama.cpp's C++ is not known, and
    probably less. On the engine ``llama.cpp-cache`` it comes on top of the wait of a layer, ``spin_ns``.
    """

    host_layers: NonNegative | None = None
    most_tokens: Count = 32
    offload_min_tokens: Count = 32

    def compose(self, context: BuildContext) -> Composition:
        """The same pool, and the same rule when it is used, for the placement, the assigner and the cache."""
        host = context.layers if self.host_layers is None else min(self.host_layers, context.layers)
        pool = HostLayersPool(host, context.top_k, self.most_tokens)
        return Composition(
            placement=pool,
            assigner=FromPool(pool, self.offload_min_tokens),
            cache=HostLayersLru(pool),
            demand_slots=1,
            decision_cost="mixtral-offloading@impl",
            parameters={"host_layers": host},
        )
