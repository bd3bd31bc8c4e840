"""Who is lowest: members of one cache group ordered by a rank that changes often and is asked for rarely; and the cache
that evicts by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from policies.mechanism.views import ExpertId
from policies.parts.caches import DemandCache


class Ranking:
    """A lazy heap. ``rank`` holds the members' present ranks; ties go to the lower id.

    Ranks that only ever grow may be written to ``rank`` directly, since entries that come up too low are corrected
    then. A rank that may fall needs ``put``.
    """

    __slots__ = ("_heap", "_held", "rank")

    def __init__(self) -> None:
        self.rank: dict[ExpertId, float] = {}
        self._heap: list[tuple[float, ExpertId]] = []
        self._held: list[tuple[float, ExpertId]] = []  # taken off the heap while blocked: an event asks many times

    def put(self, id: ExpertId, rank: float) -> None:
        """Make ``id`` a member, or change its rank."""
        self.rank[id] = rank
        if len(self._heap) > 4 * len(self.rank) + 16:
            self._sort()
        else:
            heappush(self._heap, (rank, id))

    def change(self, ranks: Mapping[ExpertId, float]) -> None:
        """Change the ranks of several members."""
        if 4 * len(ranks) > len(self.rank):
            self.rank.update(ranks)
            self._sort()
        else:
            for id, rank in ranks.items():
                self.put(id, rank)

    def _sort(self) -> None:
        """Begin the heap anew."""
        self._heap, self._held = [(rank, id) for id, rank in self.rank.items()], []
        heapify(self._heap)

    def drop(self, id: ExpertId) -> None:
        """``id`` is no longer a member."""
        del self.rank[id]

    def lowest(self, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member of least rank that is not blocked, or None."""
        heap, rank, held = self._heap, self.rank, self._held
        self._held = []
        for entry in held:
            if entry[1] in blocked:
                self._held.append(entry)
            else:
                heappush(heap, entry)
        while heap:
            known, id = heap[0]
            now = rank.get(id)
            if now == known:
                if id not in blocked:
                    return id
                self._held.append(heappop(heap))
            elif now is not None and now > known:
                heapreplace(heap, (now, id))
            else:
                heappop(heap)
        return None


class RankedCache(DemandCache, ABC):
    """Evicts the member of least rank that is not blocked, ties to the lower id.

    Subclasses say ``rank_of``, and tell the member's Ranking, ``_home[id]``, when that changes.
    """

    def __init__(self) -> None:
        self._groups: dict[int, Ranking] = {}
        self._home: dict[tuple[int, int], Ranking] = {}

    @abstractmethod
    def rank_of(self, id: ExpertId) -> float:
        """The rank with which ``id`` comes in."""

    def admitted(self, id: ExpertId, group: int) -> None:
        """Join the group."""
        home = self._home[id] = self._groups.setdefault(group, Ranking())
        home.put(id, self.rank_of(id))

    def evicted(self, id: ExpertId, group: int) -> None:
        """Leave the group."""
        self._home.pop(id).drop(id)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The lowest member."""
        ranking = self._groups.get(group)
        return ranking.lowest(blocked) if ranking else None
