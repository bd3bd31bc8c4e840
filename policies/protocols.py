"""Protocols of the five parts of a policy, and their composition: any mix of parts (docs/design.md, Policies)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np

from policies.mechanism.views import (
    Assignment,
    Commitment,
    Eviction,
    ExpertId,
    Forecast,
    LayerView,
    Phase,
    Routing,
    Swap,
    Upload,
)
from policies.parts.routers import TrueRouter

When = Literal["routed", "layer_end", "step_end"]
WritesBack = Literal["never", "alongside", "in turn"]


@dataclass(frozen=True)
class Budget:
    """Memory for cached experts, before a placement has divided it."""

    experts: int  # routed experts per layer
    expert_bytes: tuple[int, ...]  # by layer
    cache_bytes: int
    popularity: np.ndarray | None = None  # [layers, experts] share of tokens, from calibration prompts

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.expert_bytes)


@dataclass(frozen=True)
class InitialPlacement:
    """Slots per layer (None: one pool of bytes over all layers) and the residents of each layer at the start."""

    slots: tuple[int, ...] | None
    residents: tuple[tuple[int, ...], ...]


class Placement(Protocol):
    """Divides the budget and fills it before the first token.

    Lifetime: created when a policy is composed. The session calls ``place`` once, before the first step; whatever the
    placement finds out then, other parts of the same composition may share.
    """

    def place(self, budget: Budget) -> InitialPlacement:
        """Return slots and residents that fit ``budget``; the session checks."""
        ...


class Router(Protocol):
    """The experts that a layer runs, the router's choice or others, and a choice made ahead for the next layer.

    Lifetime: created when a policy is composed, used for one run. In each layer the session calls ``route`` first,
    unless ``commit`` has decided the layer before, and ``commit`` once forecasts are known (only where the policy
    looks ahead). It may remember what it has seen.
    """

    looks_ahead: bool  # may decide the next layer's routing, by a forecast

    def route(self, view: LayerView) -> Routing:
        """The routing in force for this layer."""
        ...

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        """Routing decided now for the next layer; None: that layer's own router decides."""
        ...


class Assigner(Protocol):
    """CPU, GPU or load to the GPU, for every active expert.

    Lifetime: created when a policy is composed, used for one run. The session calls ``assign`` exactly once per layer,
    after the cache has observed the routing, and nothing else calls it: an assigner may remember its decisions.
    """

    def assign(self, view: LayerView) -> Assignment:
        """Cover ``view.routing.active`` exactly once; loads must be absent experts."""
        ...


class Prefetcher(Protocol):
    """Which absent experts of later layers to copy, best first.

    Lifetime: created when a policy is composed, used for one run. After each layer's plan, but for the last layer of a
    step, the session calls ``protect`` and then ``rank``; a new ranking replaces all prefetches that have not started.
    It may remember what it has seen, and read the other parts of its composition.
    """

    into: Literal["cache", "staging"]

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Experts to copy while the link is free, now that ``plan`` is in effect; the session drops those that are on
        the GPU already. Without staging slots also of layers that are done, for the next step."""
        ...

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """Residents that no copy may displace until the next foresight."""
        ...


class Cache(Protocol):
    """Which resident to evict, whether a load is admitted, when to swap. The mechanism alone owns slots and bytes.

    Lifetime: created when a policy is composed, used for one run. ``admitted`` is called for every initial resident
    before the first step. In each layer the session calls ``observe`` and ``swaps`` ("routed"), for the layer's loads
    ``order`` and ``victim``, and ``swaps`` again at the end of the layer and of the step; ``admitted`` and ``evicted``
    report every change, also those that the cache did not choose. It may remember all of this.

    ``group`` is the layer where slots are per layer, 0 where all layers share one pool.
    """

    admits: bool  # may demand loads and cache prefetches take a cache slot at all

    def observe(self, view: LayerView) -> None:
        """A layer was routed: every active expert was looked up, all at once."""
        ...

    def admitted(self, key: ExpertId, group: int) -> None:
        """``key`` has, or is promised, a slot of ``group``."""
        ...

    def evicted(self, key: ExpertId, group: int) -> None:
        """``key`` has lost its slot, or its promise."""
        ...

    def order(self, incoming: Sequence[ExpertId]) -> Sequence[ExpertId]:
        """The order in which the copies of one event are given slots; the first are served first."""
        ...

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The resident to evict for ``incoming``: a member of ``group`` not in ``blocked``; None declines admission."""
        ...

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap | Upload | Eviction]:
        """Cache updates due now; best first."""
        ...


class HostCache(Protocol):
    """Which experts stay in the host's memory above a disk, which holds all: methods that caches of the GPU have, too.

    Lifetime: created when a policy is composed, used for one run. ``admitted`` is called for what is held before the
    first step, of ``Composition.host_start`` the best last. In each layer the session calls ``observe``, and ``victim``
    for what is read. An expert that is not admitted, or evicted, leaves when its use has ended and another one needs
    the room; needed again until then, it may be admitted without a read.

    ``group`` is the layer where the memory is divided by layer, 0 where all layers share it.
    """

    admits: bool  # may experts stay at all; asked whenever one has been read, so that it may depend on the step

    def observe(self, view: LayerView) -> None:
        """A layer was planned; its routing here is that of the experts which the host must have for it."""
        ...

    def admitted(self, key: ExpertId, group: int) -> None:
        """``key`` stays, in ``group``."""
        ...

    def evicted(self, key: ExpertId, group: int) -> None:
        """``key`` need not stay any more."""
        ...

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The expert to evict for ``incoming``: a member of ``group`` not in ``blocked``; None declines."""
        ...


class HostPrefetcher(Protocol):
    """Which experts of later layers to read ahead into the host's memory above a disk, best first.

    Lifetime: created when a policy is composed, used for one run. Called where ``Prefetcher.rank`` is, and after it.
    """

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Experts to read while the disk has nothing else to read; those that are held, or on the GPU, are left out."""
        ...


class PolicyKind(StrEnum):
    """A policy's effect on the routing, and whether it could run at all."""

    KEEPS = "keeps the routing"
    CHANGES = "changes the routing"
    CLAIRVOYANT = "clairvoyant"  # reads the future of the run


@dataclass(frozen=True)
class Needs:
    """Requirements of a policy. Anything missing is refused before the run, with the way to get it."""

    scores: bool = False
    tokens: bool = False  # token by token: ids and weights of routings, ids and scores of forecasts, sequences
    forecasts: tuple[tuple[str, int], ...] = ()  # (kind, lookahead)
    forecast_layers: Mapping[str, frozenset[int]] = field(default_factory=dict)  # layers that a kind is for; none: all
    forecast_phases: tuple[Phase, ...] = ("prefill", "decode")  # steps in which forecasts are made
    future: bool = False
    calibration: bool = False
    calibrated_tokens: bool = False  # the calibration token by token: ``Calibration.decode_ids``
    uniform_sizes: bool = False
    gpu_only: bool = False  # every expert runs on the GPU, so at least one staging slot is needed
    changes_routing: bool = False
    narrow_share: float | None = None  # bytes of a narrow copy of an expert over the expert's; None: there are none
    max_batch: int | None = None

    @property
    def live(self) -> bool:
        """True if a model that runs can give all of it: not the future, forecasts of later tokens, or narrow copies."""
        later = self.future or any(kind == "token" for kind, _ in self.forecasts)
        return not later and self.narrow_share is None

    @property
    def kind(self) -> PolicyKind:
        """A clairvoyant policy counts as that alone."""
        if self.future:
            return PolicyKind.CLAIRVOYANT
        return PolicyKind.CHANGES if self.changes_routing else PolicyKind.KEEPS


UNDECLARED = Needs()  # of a composition: those that its policy declares


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A policy ready for one run: five new parts and the parameters of the mechanism.

    Where the host's memory has no room for all experts, ``host_cache`` says what stays in it, instead of the
    scenario's ``host_keeps``; ``host_by_layer`` divides it among the layers, and ``host_start`` ranks what it holds at
    first (None: of every layer as many). ``host_prefetcher`` reads ahead for the CPU, too; copies always are.

    ``awaits_swaps``: a step begins when the link has nothing more to do: cache updates that the last one has queued
    have been copied, as far as they can be.
    ``writes_back``: whether experts go back to the host, as weights that could have changed would: the victims of a
    copy, "alongside" it or "in turn", after it and before the next one; in turn, a copy that only passes
    through staging is followed by one write-back, too.
    """

    placement: Placement
    router: Router = field(default_factory=TrueRouter)
    assigner: Assigner
    prefetcher: Prefetcher | None = None
    cache: Cache
    host_cache: HostCache | None = None
    host_prefetcher: HostPrefetcher | None = None
    host_by_layer: bool = False
    host_start: Sequence[ExpertId] | None = None
    swaps_before_prefetches: bool = False
    awaits_swaps: bool = False
    writes_back: WritesBack = "never"
    demand_slots: int = 2  # staging slots for demand loads
    prefetch_slots: int = 0  # staging slots for prefetches
    decision_cost: str = ""  # entry of the table of decision costs; empty: ``name``
    name: str = ""
    needs: Needs = UNDECLARED
    parameters: Mapping[str, object] = field(default_factory=dict)
