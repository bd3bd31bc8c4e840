"""The simple caches: static, random, first in first out, least recently or frequently used; and bases for others.

Each serves both layouts, one pool over all layers or slots by layer.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Sequence
from itertools import repeat

from policies.mechanism.views import ExpertId, LayerView, Swap
from policies.parts.lazy_heap import LazyHeap
from policies.protocols import When

_TICKS = 1 << 40  # more events than a run can have: frequency decides, then recency


class DemandCache:
    """Base of caches that change only by admitting copies: no swaps, admissions in the order of the copies."""

    admits = True

    def observe(self, view: LayerView) -> None:
        """Learn nothing."""

    def order(self, incoming: Sequence[ExpertId]) -> Sequence[ExpertId]:
        return incoming

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        return ()


class StaticCache(DemandCache):
    """Stays as it was placed; loads pass through staging."""

    admits = False

    def admitted(self, key: ExpertId, group: int) -> None:
        """Called for the initial residents alone."""

    def evicted(self, key: ExpertId, group: int) -> None:
        """Never a decision of this cache."""

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return None


class RandomCache(DemandCache):
    """Evicts a member drawn uniformly among those not blocked: the least that a cache has to beat."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._members: dict[int, list[ExpertId]] = {}
        self._place: dict[ExpertId, int] = {}

    def admitted(self, key: ExpertId, group: int) -> None:
        members = self._members.setdefault(group, [])
        self._place[key] = len(members)
        members.append(key)

    def evicted(self, key: ExpertId, group: int) -> None:
        """Fill its place with the last member."""
        members, place = self._members[group], self._place.pop(key)
        last = members.pop()
        if last != key:
            members[place] = last
            self._place[last] = place

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """Draw; after a few blocked draws, draw among the others alone."""
        members = self._members.get(group, [])
        for _ in range(4 if members else 0):
            key = members[int(self._draw.random() * len(members))]
            if key not in blocked:
                return key
        free = [key for key in members if key not in blocked]
        return self._draw.choice(free) if free else None


class LruCache(DemandCache):
    """Evicts the least recently used member; an admission counts as a use. Experts of one event are used in id order,
    and its admissions follow its hits."""

    def __init__(self) -> None:
        self._groups: dict[int, OrderedDict[ExpertId, None]] = {}
        self._home: dict[tuple[int, int], OrderedDict[ExpertId, None]] = {}

    def observe(self, view: LayerView) -> None:
        home = self._home
        for key in zip(repeat(view.layer), view.routing.active, strict=False):
            group = home.get(key)
            if group is not None:
                group.move_to_end(key)  # type: ignore[arg-type]  # equal to its ExpertId, and cheaper

    def admitted(self, key: ExpertId, group: int) -> None:
        home = self._home[key] = self._groups.setdefault(group, OrderedDict())
        home[key] = None

    def evicted(self, key: ExpertId, group: int) -> None:
        del self._home.pop(key)[key]

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        for key in self._groups.get(group, ()):
            if key not in blocked:
                return key
        return None


class FifoCache(LruCache):
    """Evicts the member that was admitted first: an LRU in which a hit is no use."""

    def observe(self, view: LayerView) -> None:
        """Learn nothing."""


class RankedCache(DemandCache, ABC):
    """Base of caches that evict the member of least rank, ties to the lower id.

    A subclass defines ``rank_of``, and calls ``rerank`` when the rank of an expert has changed.
    """

    def __init__(self) -> None:
        self._groups: dict[int, LazyHeap] = {}
        self._home: dict[tuple[int, int], LazyHeap] = {}

    @abstractmethod
    def rank_of(self, key: ExpertId) -> float:
        """The present rank of ``key``, whether it is in the cache or not."""

    def rerank(self, key: tuple[int, int]) -> None:
        """Take up the present rank of ``key``, (layer, expert); nothing happens if it is not in the cache."""
        home = self._home.get(key)
        if home is not None:
            member = ExpertId(*key)
            home.put(member, self.rank_of(member))

    def admitted(self, key: ExpertId, group: int) -> None:
        home = self._home[key] = self._groups.setdefault(group, LazyHeap())
        home.put(key, self.rank_of(key))

    def evicted(self, key: ExpertId, group: int) -> None:
        self._home.pop(key).drop(key)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        members = self._groups.get(group)
        return members.lowest(blocked) if members else None


class LfuCache(RankedCache):
    """Evicts the member used in the fewest events; ties go to the less recently used, then to the lower id.

    ``history``: counts go on while an expert is out of the cache ("perfect" LFU). Without it an expert starts at zero
    whenever it is admitted (MoE-Infinity's in-cache visit count). ``recency``: without it, ties go to the lower expert,
    then to the lower layer, whichever was used last (the order in which MoE-Infinity's released code scans).
    """

    def __init__(self, history: bool = True, recency: bool = True) -> None:
        super().__init__()
        self.history = history
        self.recency = recency
        self._rank: dict[tuple[int, int], int] = {}  # uses * _TICKS + last event, or expert
        self._event = 0

    def observe(self, view: LayerView) -> None:
        """Count one use of every active expert."""
        self._event += 1
        layer, home, rank, event = view.layer, self._home, self._rank, self._event
        for expert in view.routing.active:
            key = (layer, expert)
            group = home.get(key)
            if group is not None or self.history:
                tie = event if self.recency else expert
                now = rank[key] = (rank.get(key, 0) // _TICKS + 1) * _TICKS + tie
                if group is not None:  # as ``rerank``, but cheaper: the rank has grown
                    group.rank[key] = now  # type: ignore[index]  # equal to its ExpertId

    def rank_of(self, key: ExpertId) -> int:
        """Uses first; with its history, or from zero."""
        return self._rank[key]

    def admitted(self, key: ExpertId, group: int) -> None:
        """Join the group; a first admission counts as a use now."""
        self._rank.setdefault(key, self._event if self.recency else key.expert)
        super().admitted(key, group)

    def evicted(self, key: ExpertId, group: int) -> None:
        """Leave the group; without history also the count."""
        super().evicted(key, group)
        if not self.history:
            del self._rank[key]
