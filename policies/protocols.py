"""Protocols of the five parts of a policy; any mix of parts is a policy (docs/design.md, Policies)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np

from policies.mechanism.views import (
    Assignment,
    Commitment,
    ExpertId,
    Forecast,
    LayerView,
    Phase,
    Routing,
    Swap,
)

When = Literal["routed", "layer_end", "step_end"]


@dataclass(frozen=True)
class Budget:
    """Room for cached experts, before a placement has divided it."""

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
    """Slots per layer (None: one pool of bytes over all layers) and who sits in them before the first token."""

    slots: tuple[int, ...] | None
    residents: tuple[tuple[int, ...], ...]


class Placement(Protocol):
    """Divides the budget and fills it before the first token."""

    def place(self, budget: Budget) -> InitialPlacement:
        """Return slots and residents that fit ``budget``; the session checks."""
        ...


class Router(Protocol):
    """Whether a layer runs the router's own experts, and what it commits for the next layer."""

    looks_ahead: bool  # may decide the next layer's routing, by a forecast

    def route(self, view: LayerView) -> Routing:
        """The routing in force for this layer."""
        ...

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        """Routing decided now for the next layer, or None to let that layer's own router speak."""
        ...


class Assigner(Protocol):
    """CPU, GPU-resident or load-to-GPU for every active expert."""

    def assign(self, view: LayerView) -> Assignment:
        """Cover ``view.routing.active`` exactly once; loads must be absent experts.

        Called once a layer, by the session alone: an assigner may remember what it has decided.
        """
        ...


class Prefetcher(Protocol):
    """Which absent experts of later layers to bring, best first."""

    into: Literal["cache", "staging"]

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Experts to copy while the link is free, now that ``plan`` is under way; the session drops those that are
        there already."""
        ...

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """Residents that no copy may displace until the next foresight."""
        ...


class Cache(Protocol):
    """Who leaves, whether a load is admitted, when to swap. Slots and bytes are the residency manager's business.

    ``group`` is the layer where slots are per layer, 0 where all layers share one pool.
    """

    admits: bool  # may demand loads and cache prefetches take a cache slot at all

    def observe(self, view: LayerView) -> None:
        """A layer was routed: every active expert was looked up, together."""
        ...

    def admitted(self, id: ExpertId, group: int) -> None:
        """``id`` has, or is promised, a slot of ``group``."""
        ...

    def evicted(self, id: ExpertId, group: int) -> None:
        """``id`` has lost its slot, or its promise."""
        ...

    def order(self, incoming: Sequence[ExpertId]) -> Sequence[ExpertId]:
        """The copies of one event in the order in which they ask for slots: who asks first is served first."""
        ...

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """Who makes room for ``incoming``: a member of ``group`` not in ``blocked``; None declines the admission."""
        ...

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        """Cache updates due now; best first."""
        ...


class PolicyKind(StrEnum):
    """What a policy does to the routing, and whether it could run at all."""

    KEEPS = "keeps the routing"
    CHANGES = "changes the routing"
    CLAIRVOYANT = "clairvoyant"  # reads the future of the run


@dataclass(frozen=True)
class Needs:
    """What a policy must be given. Anything missing is refused before the run, with the way to get it."""

    scores: bool = False
    tokens: bool = False  # token by token: ids and weights of routings, ids and scores of forecasts, sequences
    forecasts: tuple[tuple[str, int], ...] = ()  # (kind, lookahead)
    forecast_layers: Mapping[str, frozenset[int]] = field(default_factory=dict)  # layers that a kind is for; none: all
    forecast_phases: tuple[Phase, ...] = ("prefill", "decode")  # steps in which forecasts are made
    future: bool = False
    calibration: bool = False
    uniform_sizes: bool = False
    gpu_only: bool = False  # every expert runs on the GPU, so at least one staging slot is needed
    changes_routing: bool = False
    max_batch: int | None = None

    @property
    def kind(self) -> PolicyKind:
        """A clairvoyant policy counts as that alone."""
        if self.future:
            return PolicyKind.CLAIRVOYANT
        return PolicyKind.CHANGES if self.changes_routing else PolicyKind.KEEPS


@dataclass(frozen=True)
class Composition:
    """A policy ready to run: five fresh parts and the parameters of the mechanism."""

    name: str
    placement: Placement
    router: Router
    assigner: Assigner
    prefetcher: Prefetcher | None
    cache: Cache
    needs: Needs = field(default_factory=Needs)
    swaps_before_prefetches: bool = False
    writes_back: bool = False  # victims are copied back to the host, as weights that could have changed would be
    demand_slots: int = 2  # staging slots for demand loads
    prefetch_slots: int = 0  # staging slots for prefetches
    decision_cost: str = ""  # entry of the table of decision costs; empty: ``name``
    parameters: Mapping[str, object] = field(default_factory=dict)
