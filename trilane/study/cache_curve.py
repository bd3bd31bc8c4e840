"""Hit rates of one expert cache against its size: a logical replay of a trace, without time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from policies.mechanism.cache_replay import ReplayEvent, replay
from policies.parts.belady import BeladyBypassCache, BeladyCache
from policies.parts.caches import LfuCache, LruCache, RandomCache
from policies.parts.future import Future
from policies.parts.placements import NoPlacement, PoolPlacement
from policies.protocols import Budget, Cache, Placement
from policies.registry import SYSTEMS, BuildContext, added, system
from traces.batches import layer_uses
from traces.trace import Trace
from trilane.common.errors import TrilaneError
from trilane.common.names import unknown


class CurveError(TrilaneError):
    """A cache policy or a size that there is not; the message lists what there is."""


class CurvePoint(NamedTuple):
    """One cache: hits by lookup, of the whole trace and of its decode steps alone (fractions)."""

    policy: str
    capacity_bytes: int
    hit_rate: float
    hit_rate_decode: float
    lookups: int


class _Kind(NamedTuple):
    about: str
    make: Callable[[CacheCurve], Cache]
    placement: Callable[[], Placement] = PoolPlacement


_KINDS: Mapping[str, _Kind] = {
    "lru": _Kind("evicts the least recently used", lambda curve: LruCache()),
    "lfu": _Kind("evicts the least often used so far", lambda curve: LfuCache()),
    "random": _Kind("evicts at random", lambda curve: RandomCache(curve.seed)),
    "layer-lru": _Kind("LRU with the same room for every layer", lambda curve: LruCache(), NoPlacement),
    "belady": _Kind("clairvoyant; admits every miss", lambda curve: BeladyCache(curve.future)),
    "belady-bypass": _Kind("clairvoyant; may decline a miss", lambda curve: BeladyBypassCache(curve.future)),
}
CURVE_POLICIES: Mapping[str, str] = {name: kind.about for name, kind in _KINDS.items()}
DEFAULT_SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)  # of all routed experts


@dataclass(frozen=True)
class CacheCurve:
    """A trace made ready for replays: sequence by sequence, each alone (batch 1), the cache staying warm."""

    trace: Trace
    seed: int = 0

    @classmethod
    def prepared(cls, trace: Trace, seed: int = 0) -> CacheCurve:
        """Make a curve whose events and future are worked out now rather than at the first replay."""
        curve = cls(trace, seed)
        assert curve.future is not None
        return curve

    @cached_property
    def events(self) -> list[ReplayEvent]:
        """Every layer of every step; a prefill is one step, so an expert counts once a layer however many tokens."""
        return [ReplayEvent(*use) for use in layer_uses(self.trace)]

    @cached_property
    def future(self) -> Future:
        """Future uses, which clairvoyant caches know."""
        return Future([(event.step, event.layer, event.active) for event in self.events])

    @property
    def least_bytes(self) -> int:
        """The smallest cache that any expert fits: the size of the largest."""
        shape = self.trace.shape
        return max(shape.expert_bytes_by_layer)

    def check(self, capacity_bytes: int) -> None:
        """Raise CurveError for a cache that some expert does not fit."""
        if capacity_bytes < self.least_bytes:
            raise CurveError(
                f"expected a cache of at least one expert, {self.least_bytes:,} bytes, got {capacity_bytes:,} bytes; "
                f"all experts of the trace take {self.trace.shape.routed_bytes:,} bytes"
            )

    def point(self, policy: str, capacity_bytes: int) -> CurvePoint:
        """Replay one cache, empty at first. Raises CurveError for an unknown policy or a size below zero."""
        kind = curve_policy(policy)
        if capacity_bytes < 0:
            raise CurveError(f"expected a cache size >= 0, got {capacity_bytes} bytes")
        shape = self.trace.shape
        sizes = shape.expert_bytes_by_layer
        budget = Budget(shape.experts, sizes, capacity_bytes)
        result = replay(self.events, kind.make(self), budget, kind.placement())
        return CurvePoint(policy, capacity_bytes, result.hit_rate, result.hit_rate_decode, result.lookups)


def cache_curve(trace: Trace, policies: Sequence[str], capacities: Sequence[int], seed: int = 0) -> list[CurvePoint]:
    """Hit rates of every policy at every capacity (bytes)."""
    curve = CacheCurve(trace, seed)
    return [curve.point(policy, capacity) for policy in policies for capacity in capacities]


def unit_of(size: int) -> tuple[str, int]:
    """The unit to show ``size`` bytes and more in, and its bytes."""
    units = (("MiB", 2**20), ("KiB", 2**10))
    return next(((name, factor) for name, factor in units if size >= factor), ("bytes", 1))


def curve_policy(name: str) -> _Kind:
    """The cache of that name, or that of a policy which the caller has registered.

    Raises CurveError for an unknown name, and for a policy that needs more than the routing.
    """
    if name in _KINDS:
        return _KINDS[name]
    if not added(name):
        raise CurveError(unknown("cache policy", name, _KINDS))
    needs = SYSTEMS[name].needs
    if needs.scores or needs.tokens or needs.calibration:
        raise CurveError(f"policy {name!r} needs router scores, single tokens or calibration, which a replay lacks")
    return _Kind(SYSTEMS[name].summary, partial(_cache_of, name))


def _cache_of(policy: str, curve: CacheCurve) -> Cache:
    shape = curve.trace.shape
    context = BuildContext(shape.name, shape.experts, shape.moe_layers, shape.top_k, seed=curve.seed)
    entry = system(policy)
    return entry.build(entry.parse({}), context).cache
