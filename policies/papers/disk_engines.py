"""Engines and proposals for models that are larger than the host's memory (docs/readings.md#experts-on-a-disk):
streaming into slots of the GPU, a memory that only decode steps fill, learned pins, reads ahead of whole layers.

Where the host has room for all experts nothing is read, and these policies do what is left of them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from policies.baselines.static import whole_layers
from policies.mechanism.host_tier import by_popularity
from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.papers.llama_cpp import OFFLOAD_MIN_TOKENS
from policies.parts.assigners import FromTokens, LoadAll, ResidentOrCpu
from policies.parts.caches import LfuCache, LruCache, StaticCache
from policies.parts.host_level import NothingStays, OnlyIn, PinnedShare, ReadForecast
from policies.parts.placements import NoPlacement, PoolPlacement, PopularityPlacement
from policies.protocols import Composition, Needs
from policies.system import BuildContext, NonNegative, Policy, register
from trilane.common.hints import Count, Share


@register(
    "moe-stream",
    "slots on the GPU by layer, filled from the disk; the host keeps nothing",
    source="llama.cpp PR #25294 (--moe-stream, --moe-stream-cache)",
)
@dataclass(frozen=True)
class MoeStream(Policy):
    """Each layer has so many slots on the GPU, from which the least recently used expert leaves; what misses is read
    past the system's cache, and copied. All experts are computed on the GPU.

    demand_slots: staging slots for what a layer has no slot for (ours). A prompt that uses more experts than there are
    slots is computed in waves there; here these experts pass through staging, each read once, too.
    """

    needs = Needs(gpu_only=True)

    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        return Composition(
            placement=NoPlacement(), assigner=LoadAll(), cache=LruCache(), host_cache=NothingStays(), host_start=(),
            demand_slots=self.demand_slots, decision_cost="on-demand",
        )


class DecodeLru(LruCache):
    """An LRU from which prompts evict nothing; they may fill what is free."""

    def __init__(self) -> None:
        super().__init__()
        self._evicts = False

    def observe(self, view: LayerView) -> None:
        self._evicts = view.phase == "decode"
        super().observe(view)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return super().victim(incoming, group, blocked) if self._evicts else None


@register(
    "ds4",
    "one LRU on the GPU; the host's memory is filled by decode steps alone",
    source="antirez/ds4, --ssd-streaming: PR #504 and #647 (GPU), issue #629 (host memory)",
)
@dataclass(frozen=True)
class Ds4(Policy):
    """All experts are computed on the GPU, whose cache is one LRU over all layers; a prompt's experts fill what is free
    and evict none. In the host's memory stay those that decode steps have read, least recently used first to leave: a
    prompt uses nearly all experts, and would leave only its last layers.

    host_tier: False is the program without that branch, in which the host keeps nothing.
    demand_slots: staging slots (ours).

    Inferred: the host's order of eviction, which the issue's text does not name.
    """

    needs = Needs(gpu_only=True)

    host_tier: bool = True
    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        host = OnlyIn("decode", LruCache()) if self.host_tier else NothingStays()
        return Composition(
            placement=PoolPlacement(), assigner=LoadAll(), cache=DecodeLru(), host_cache=host, host_start=(),
            demand_slots=self.demand_slots, decision_cost="on-demand",
        )


@register(
    "colibri",
    "learned pins and an LRU a layer in the host's memory; reads ahead",
    source="JustVugg/colibri at 01a537b, README; PR #35 (PILOT), #815 (pins)",
)
@dataclass(frozen=True)
class Colibri(Policy):
    """The CPU computes what the GPU does not hold; the GPU holds the most used experts, and nothing is copied to it.
    The host's memory is divided by layer: the most used experts are pinned, the rest is an LRU.

    pinned: share of each layer's memory, at most, for experts that are pinned by the counts of earlier sessions, here
        of the calibration (half of the budget; #815).
    lookahead: experts of the next layer that its router names one layer early, and that are read ahead (``PILOT``).
        None: the model's top-k; 0: none.

    Inferred: that the GPU's share is the most used experts of all layers together. Not modelled: drafts, and the guard
    of #474, which drops a read ahead that would displace a hotter expert.
    """

    pinned: Share = 0.5
    lookahead: NonNegative | None = None

    @property
    def needs(self) -> Needs:
        return Needs(forecasts=() if self.lookahead == 0 else (("gate", 1),), calibration=True)

    def compose(self, context: BuildContext) -> Composition:
        popularity = context.required_calibration().popularity
        size = context.top_k if self.lookahead is None else self.lookahead
        return Composition(
            placement=PopularityPlacement(popularity=popularity), assigner=ResidentOrCpu(), cache=StaticCache(),
            host_cache=PinnedShare(self.pinned, LruCache()), host_by_layer=True,
            host_start=by_popularity(popularity.tolist()), host_prefetcher=ReadForecast(size, "gate") if size else None,
            demand_slots=0, decision_cost="ktransformers", parameters={"lookahead": size},
        )


@register(
    "pin-hot",
    "whole layers on the GPU; the host keeps the experts that were used most",
    source="llama.cpp PR #26414 (--pin-hot-experts)",
)
@dataclass(frozen=True)
class PinHot(Policy):
    """No parameters: layers as in ``llama.cpp``; of the experts on the CPU's side, the host's memory keeps those that
    the run has used most so far, and exchanges them as counts change.

    Inferred: that all of the memory is pinned but for two experts' room; the program has a number (N) for it.
    """

    def compose(self, context: BuildContext) -> Composition:
        return replace(whole_layers(), host_cache=LfuCache())


class LayersAhead:
    """In prompts all experts of the next ``layers`` layers that are not on the GPU, nearest first."""

    def __init__(self, layers: int, experts: int) -> None:
        self.layers, self._experts = layers, range(experts)

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        if view.phase == "decode":
            return ()
        resident, end = view.residency.resident, len(view.costs)
        ahead = range(view.layer + 1, min(view.layer + 1 + self.layers, end))
        return [ExpertId(layer, expert) for layer in ahead for expert in self._experts if expert not in resident[layer]]


@register(
    "ik-prefetch",
    "whole layers on the GPU; a prompt's layers are read ahead and not kept",
    source="ik_llama.cpp PR #2101 (--prefetch-experts)",
)
@dataclass(frozen=True)
class IkPrefetch(Policy):
    """Layers as in ``llama.cpp@impl``: a prompt's experts are copied to the GPU. Readers fetch the next layers in full
    while a prompt is computed, and mark their pages to leave first once used; in decode steps they fetch what was
    routed.

    ahead: layers that are read ahead of a prompt (``GGML_MOE_PREFETCH_AHEAD``).

    Inferred: the page cache as an LRU of experts that prompts do not fill.
    """

    ahead: Count = 3

    def compose(self, context: BuildContext) -> Composition:
        assigner = FromTokens(OFFLOAD_MIN_TOKENS * context.top_k, LoadAll(), ResidentOrCpu())
        return replace(
            whole_layers(assigner, demand_slots=1), host_cache=OnlyIn("decode", LruCache()),
            host_prefetcher=LayersAhead(self.ahead, context.experts),
        )
