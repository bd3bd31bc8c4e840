"""llama.cpp: whole layers' experts on the CPU or the GPU, its cache of experts, and caches that were proposed for it.

As published, experts run where they are; in the released code a large batch is worth copying them to the GPU. The cache
(``--moe-cache-mib``) is an LRU pool on the GPU for the experts that the host keeps, whose misses are uploaded and
waited for.

Of the caches proposed in 2026, experts on the GPU run there, the CPU computes those that miss, and no layer waits for a
copy. A prompt is processed as by ``llama.cpp@impl``, and leaves the cache as it is. Whether copies come from pinned or
from pageable memory is a property of the machine, as with ``llama.cpp@impl``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from policies.baselines.static import whole_layers
from policies.mechanism.views import Assignment, ExpertId, LayerView
from policies.parts.admission import Admission, Hotter, SecondMiss
from policies.parts.assigners import FromTokens, LoadAll, ResidentOrCpu, settle
from policies.parts.caches import LfuCache, LruCache, StaticCache
from policies.parts.placements import NoPlacement, Pooled, PopularityPlacement
from policies.parts.repeated_uploads import RepeatedUploads
from policies.parts.upload_cache import CountedSlots, Frees, InService, UploadCache
from policies.protocols import Budget, Composition, InitialPlacement, Needs, Placement
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count, at_least

Start = Literal["empty", "popular"]
OFFLOAD_MIN_TOKENS = 32  # GGML_OP_OFFLOAD_MIN_BATCH: from so many tokens on, missing experts are copied, and not kept


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
        """Compose with whole layers; large steps go through one staging slot."""
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
        """True if the layer's experts come from the pool, whatever the step's tokens may choose."""
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
        """Compose with one pool, and one rule when it is used, for the placement, the assigner and the cache."""
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


def _placement(start: Start, context: BuildContext) -> Placement:
    """Even slots: empty, or with each layer's most popular experts of the decode steps of calibration prompts."""
    if start == "empty":
        return NoPlacement()
    return PopularityPlacement(uniform=True, popularity=context.required_calibration().decode_popularity)


def _composition(context: BuildContext, cache: UploadCache, placement: Placement) -> Composition:
    assigner = FromTokens(OFFLOAD_MIN_TOKENS * context.top_k, LoadAll(), InService(cache))
    return Composition(placement=placement, assigner=assigner, cache=cache, demand_slots=1)


@dataclass(frozen=True)
class _Uploads(Policy):
    """Parameters of every cache with uploads.

    inserts: uploads of a layer in a step, at most.
    start: the cache is "empty" at first, or holds each layer's most "popular" experts of calibration prompts, as after
        a start from a file of counts.
    """

    inserts: Count = 2
    start: Start = "empty"

    @property
    def needs(self) -> Needs:
        return Needs(calibration=self.start == "popular")


@dataclass(frozen=True)
class _WithAdmission(_Uploads):
    """Admission.

    admits: which misses are uploaded: "every" one, the "second" of an expert within a window, or those of experts
        "hotter" than the next victim, by a quarter and 1. Free slots take any.
    window: steps of that window. half_life: steps after which heat, the number of steps that used an expert, is halved.
    """

    admits: Literal["every", "second", "hotter"] = "every"
    window: Count = 8
    half_life: Count = 64

    def _admission(self) -> Admission:
        if self.admits == "second":
            return SecondMiss(self.window)
        return Hotter(self.half_life) if self.admits == "hotter" else Admission()

    def _lru(self, context: BuildContext, frees: Frees, pool: bool = False) -> Composition:
        placement = _placement(self.start, context)
        slots = CountedSlots(Pooled(placement) if pool else placement)
        cache = UploadCache(LruCache(), self._admission(), slots, self.inserts, frees=frees)
        return _composition(context, cache, slots)


@register(
    "llama-cache-lru",
    "LRU on the GPU, misses on the CPU, uploads next to it",
    source="everett6/moe-prefetch, patches/0002 and 0007, of llama.cpp PR #27861",
)
@dataclass(frozen=True)
class LlamaCacheLru(_WithAdmission):
    """The cache of llama.cpp PR #27861 as repaired in everett6/moe-prefetch: uploads begin as soon as a layer is
    routed, into slots that the end of the step before has freed.

    frees: "ahead" as there; "copy" (ours) has no free slots: a victim stays until the copy that replaces it begins.
    """

    frees: Literal["ahead", "copy"] = "ahead"

    def compose(self, context: BuildContext) -> Composition:
        return self._lru(context, self.frees)


@register(
    "llama-cache-lru@impl",
    "a slot is out of service while its upload waits",
    source="llama.cpp PR #27861, as at bccbacd; everett6/moe-prefetch, docs/FINAL_RESULTS.md",
)
@dataclass(frozen=True)
class LlamaCacheLruImpl(_WithAdmission):
    """The code of PR #27861: at the end of a step, uploads of its misses are requested, and each takes the slot of the
    least recent expert at once, however many wait for the link. Admission other than of every miss is everett6's.

    repeats: an expert that misses while its upload waits is requested again, into another slot, as the code does, and
        misses again as soon as one of the two is given away (``RepeatedUploads``).
    """

    repeats: bool = True

    def compose(self, context: BuildContext) -> Composition:
        if not self.repeats:
            return self._lru(context, "request")
        slots = CountedSlots(_placement(self.start, context))
        return _composition(context, RepeatedUploads(self._admission(), slots, self.inserts, context.experts), slots)


@register(
    "llama-cache-heat",
    "the hottest experts on the GPU, changed with hysteresis",
    source="llama.cpp PR #26563, with the numbers of its author's llama-wackMall v5",
)
@dataclass(frozen=True)
class LlamaCacheHeat(_Uploads):
    """The coldest expert of a layer leaves for one that missed and is hotter. Heat is the number of steps that used an
    expert (``LLAMA_EXPERT_DECAY`` 1, the default: it does not fade).

    margin: how many times as hot the incoming one must be (``LLAMA_EXPERT_HYSTERESIS``).
    dwell: steps for which an uploaded expert stays.

    Ours, as the sources do not say: ``inserts``, and that a victim stays until its slot is overwritten.
    """

    margin: Annotated[float, at_least(1)] = 1.5
    dwell: NonNegative = 32

    def compose(self, context: BuildContext) -> Composition:
        slots = CountedSlots(_placement(self.start, context))
        hotter = Hotter(None, self.margin, 0.0)
        return _composition(context, UploadCache(LfuCache(), hotter, slots, self.inserts, dwell=self.dwell), slots)


@register(
    "llama-cache-pool",
    "one LRU of all layers; misses on the CPU, uploads next to it",
    source="llama.cpp PR #28248 (one pool of slots) and tetherto/qvac-fabric-llm.cpp PR #232 (a global LRU)",
)
@dataclass(frozen=True)
class LlamaCachePool(_WithAdmission):
    """One pool of slots for all layers. A victim stays until its slot is overwritten (ours). The cache of qvac #232
    waits for its misses and computes all of them on the GPU: that is ``on-demand`` with ``pool``."""

    def compose(self, context: BuildContext) -> Composition:
        return self._lru(context, "copy", pool=True)


@register(
    "llama-cache-static",
    "experts chosen by a profile stay; the others on the CPU",
    source="thecodacus/llama.cpp PR #5 (--moe-cache-profile, --moe-cache-slots)",
)
@dataclass(frozen=True)
class LlamaCacheStatic(Policy):
    """No parameters: as many experts of every layer as fit, the most used of decode steps; nothing moves. Prompts, too,
    run on both processors."""

    needs = Needs(calibration=True)

    def compose(self, context: BuildContext) -> Composition:
        return Composition(
            placement=_placement("popular", context), assigner=ResidentOrCpu(), cache=StaticCache(), demand_slots=0,
            decision_cost="ktransformers",
        )
