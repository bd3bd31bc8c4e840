"""Inputs and outputs of policies and session: frozen values, integer nanoseconds, no behaviour beyond look-ups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, Literal, NamedTuple

Phase = Literal["prefill", "decode"]
_make_tuple: Callable[..., Any] = tuple.__new__
INFINITE_NS = 1 << 62  # "absent": later than any time that a run can reach


class PolicyError(RuntimeError):
    """A policy or a backend broke a rule of the session; the message names rule, place and part.

    ``method``: that of the part which returned what breaks the rule, where that is known.
    """

    def __init__(self, message: str, method: object = None) -> None:
        super().__init__(message)
        self.method = method


class ExpertId(NamedTuple):
    """One routed expert of the model."""

    layer: int
    expert: int


def expert_ids(layer: int, experts: Iterable[int]) -> list[ExpertId]:
    """Experts of one layer, in order. (Written in C as far as possible: forecasts name thousands of experts a step.)"""
    return list(map(_make_tuple, repeat(ExpertId), zip(repeat(layer), experts)))


class Routing(NamedTuple):
    """The experts that one MoE layer's tokens were routed to in one step.

    ``active`` are the experts with workload > 0, ascending; ``tokens[i]`` is the workload of ``active[i]``.
    ``token_ids`` and ``token_weights`` ([tokens][k], descending weight) are there for policies that change routing or
    weigh tokens; they are empty unless the policy needs tokens.
    """

    active: tuple[int, ...]
    tokens: tuple[int, ...]
    token_ids: Sequence[Sequence[int]] = ()
    token_weights: Sequence[Sequence[float]] = ()

    def workload(self) -> dict[int, int]:
        """Tokens of every active expert."""
        return dict(zip(self.active, self.tokens, strict=True))

    def without(self, experts: Sequence[int]) -> Routing:
        """The routing of the other experts."""
        rest = [(e, w) for e, w in zip(self.active, self.tokens, strict=True) if e not in experts]
        return self._replace(active=tuple(e for e, _ in rest), tokens=tuple(w for _, w in rest))


class Forecast(NamedTuple):
    """Predicted routing of a later layer: ``active`` experts by descending predicted ``tokens``.

    They follow from the k best of each token; ties go to the expert that ranks higher in some token's choice, then to
    the lower id (an oracle's to the lower id). ``token_ids`` and ``token_scores`` ([tokens][m], descending, m >= 2k or
    all experts) are there for policies that need tokens; scores only where the forecast has any.
    A forecast of the kind ``token`` was made by the token before: it is given again at every layer before its own. One
    that is about a later step (``steps_ahead``) is given once, with the first layer.
    """

    layer: int
    kind: str
    active: tuple[int, ...]
    tokens: tuple[int, ...]
    token_ids: Sequence[Sequence[int]] = ()
    token_scores: Sequence[Sequence[float]] = ()
    steps_ahead: int = 0


class ExpertCosts(NamedTuple):
    """The planner's expert times of one layer, in ns: tables by workload (index 0 is 0), and one copy.

    ``first_gpu_ns`` and ``first_cpu_ns`` are what the first expert of a layer takes in addition on its device: on the
    GPU, kernels that the others share. An expert that is copied for the layer runs by itself and takes them, too.
    ``cpu_permille`` and ``copy_permille`` are the rates of CPU experts and of copies while both run, and
    ``both_ways_permille`` those of a copy and a write-back;
    ``between_ns`` is the time from the end of one layer's experts to the next plan, and ``exchange_ns`` that of the
    transfers which a CPU with any expert needs, activations there and the result back; both for one token.
    ``launch_ns`` is the host's time to launch an expert on the GPU, which takes no less for it.
    ``narrow``: what differs for copies of fewer bits, if there are any. They have expert numbers of their own.
    """

    gpu_ns: Sequence[int]
    cpu_ns: Sequence[int]
    first_cpu_ns: int
    copy_ns: int
    expert_bytes: int
    writeback_ns: int = 0  # back to the host, where a policy writes its victims back
    cpu_permille: int = 1000
    copy_permille: int = 1000
    between_ns: int = 0
    exchange_ns: int = 0
    launch_ns: int = 0
    first_gpu_ns: int = 0
    both_ways_permille: int = 1000
    narrow: NarrowCopies | None = None
    read_ns: int = 0  # one read from the disk, where the host's memory has no room for all experts

    def of(self, expert: int) -> ExpertCosts:
        """The costs of an expert by its number, which may be that of a narrow copy."""
        return self if self.narrow is None or expert < self.narrow.first else self.narrow.costs


class NarrowCopies(NamedTuple):
    """Copies of a layer's experts in fewer bits: number ``first`` + e is that of expert e < ``first``. To the mechanism
    they are experts, smaller than the others, which are computed where a routing names them."""

    first: int
    costs: ExpertCosts


class LayerInput(NamedTuple):
    """Input of the session when a layer's routing is known."""

    step: int
    layer: int
    phase: Phase
    routing: Routing
    scores: Sequence[Sequence[float]] | None = None  # [tokens][experts] router probabilities
    sequences: Sequence[int] = ()  # the sequence of each token; empty unless the policy needs tokens
    h2d_backlog_ns: int = 0  # the rest of the running copy
    cpu_backlog_ns: int = 0  # the rest of precomputed and deferred experts
    disk_backlog_ns: int = 0  # the rest of the running read


class ResidencyView(NamedTuple):
    """The experts of each layer that a GPU kernel could read now, without those that only pass through."""

    resident: Sequence[Collection[int]]  # cache slots, by layer
    staged: Sequence[Collection[int]]  # staging slots, by layer


class HostView(NamedTuple):
    """The host's memory above a disk. An expert that it does not hold is read before the CPU or a copy uses it, which
    takes ``read_ns`` of its costs; the disk reads one at a time."""

    held: Container[ExpertId]
    backlog_ns: int  # the rest of the running read


class LayerView(NamedTuple):
    """All that a policy may use when a layer is planned: the present and the planner's costs, never the future."""

    step: int
    layer: int
    phase: Phase
    routing: Routing
    scores: Sequence[Sequence[float]] | None
    sequences: Sequence[int]
    ready_ns: Mapping[int, int]  # of every active expert: 0 on the GPU, remaining ns if loading, INFINITE_NS if absent
    h2d_backlog_ns: int
    cpu_backlog_ns: int
    costs: Sequence[ExpertCosts]  # by layer
    residency: ResidencyView
    flying: tuple[ExpertId, ...] = ()  # experts of the copies in flight, the last of which arrives at h2d_backlog_ns
    host: HostView | None = None  # None: the host's memory has room for all experts


class Assignment(NamedTuple):
    """Devices of the active experts. ``gpu`` and ``cpu`` are in running order; ``loads`` are those of ``gpu`` that
    must be copied, in copy order; ``makespan_ns`` is what the assigner expects of the experts of this layer.

    ``streamed`` are experts without workload that are copied all the same, before ``loads``, because the layer is
    copied as a whole. Those on the GPU, or in flight already, are left out and not awaited; the layer ends no earlier
    than the copies of the others.

    ``deferred`` are the last of ``cpu``: experts whose results are added to the output of the next layer, so that this
    one does not wait for them."""

    gpu: tuple[int, ...]
    cpu: tuple[int, ...]
    loads: tuple[int, ...]
    makespan_ns: int
    streamed: tuple[int, ...] = ()
    deferred: tuple[int, ...] = ()


class Commitment(NamedTuple):
    """Routing decided ahead for the next layer, and its experts that the CPU computes on this layer's activations."""

    routing: Routing
    precompute: tuple[int, ...] = ()


class Foresight(NamedTuple):
    """Decisions for later layers: copies in order, routing committed for the next layer, residents that must not be
    chosen as victims until the next foresight."""

    prefetches: tuple[ExpertId, ...] = ()
    commit: Commitment | None = None
    protect: frozenset[ExpertId] = frozenset()


class Swap(NamedTuple):
    """A cache update: ``incoming`` is copied into the slot of ``outgoing``, of the same layer."""

    incoming: ExpertId
    outgoing: ExpertId


class Upload(NamedTuple):
    """A cache update: ``incoming`` is copied into a free slot, or that of the cache's victim when the copy starts."""

    incoming: ExpertId


class Eviction(NamedTuple):
    """A cache update: ``outgoing`` leaves its slot free, at once. Asked for at the end of a layer or of a step."""

    outgoing: ExpertId


class Updates(NamedTuple):
    """Outcome of the requested cache updates: ``queued`` for the link, or ``adopted`` without a copy, because the
    incoming expert was still in a staging slot (DALI, Section 4.2); ``evicted`` experts have left."""

    queued: tuple[Swap | Upload, ...] = ()
    adopted: tuple[Swap, ...] = ()
    evicted: tuple[ExpertId, ...] = ()


class Copy(NamedTuple):
    """A copy of one expert to the GPU. ``victims`` are evicted at the moment it starts."""

    key: ExpertId
    kind: Literal["demand", "prefetch", "swap"]
    into: Literal["cache", "staging"]
    victims: tuple[ExpertId, ...]
    expert_bytes: int


class Plan(NamedTuple):
    """One layer's decision, checked. ``gpu`` is in stream order: experts on the GPU, those in flight, ``loads``."""

    layer: int
    routing: Routing
    gpu: tuple[int, ...]
    cpu: tuple[int, ...]
    loads: tuple[int, ...]
    awaited: tuple[int, ...]  # the experts of ``gpu`` whose copies were in flight already
    precomputed: tuple[int, ...]  # active experts whose result the CPU computes, or computed, ahead
    withdrawn: tuple[ExpertId, ...]  # queued prefetches of this layer that are no longer needed
    released: tuple[ExpertId, ...]  # prefetched experts of this layer that lost their staging slot unused
    swaps: tuple[Swap | Upload, ...]  # cache updates queued because of this routing
    resident: tuple[int, ...]  # active experts that were on the GPU when the layer was routed
    makespan_ns: int
    streamed: tuple[int, ...] = ()  # copied before ``loads``, without workload
    deferred: tuple[int, ...] = ()  # the last of ``cpu``, whose results are added to the next layer's output

    @property
    def immediate(self) -> tuple[int, ...]:
        """The experts of ``cpu`` for which the layer waits."""
        return self.cpu[: len(self.cpu) - len(self.deferred)]
