"""Expert caches proposed for llama.cpp in 2026: experts on the GPU run there, the CPU computes those that miss, and no
layer waits for a copy. A prompt is processed as by ``llama.cpp@impl``, and leaves the cache as it is.

Whether copies come from pinned or from pageable memory is a property of the machine, as with ``llama.cpp@impl``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from policies.parts.admission import Admission, Hotter, SecondMiss
from policies.parts.assigners import FromTokens, LoadAll, ResidentOrCpu
from policies.parts.caches import LfuCache, LruCache, StaticCache
from policies.parts.placements import NoPlacement, Pooled, PopularityPlacement
from policies.parts.repeated_uploads import RepeatedUploads
from policies.parts.upload_cache import CountedSlots, Frees, InService, UploadCache
from policies.protocols import Composition, Needs, Placement
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count, at_least

Start = Literal["empty", "popular"]
OFFLOAD_MIN_TOKENS = 32  # GGML_OP_OFFLOAD_MIN_BATCH: from so many tokens on, missing experts are copied, and not kept


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
