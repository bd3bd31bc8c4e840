"""Who is lowest: members of one cache group ordered by a rank that changes often and is asked for rarely."""

from __future__ import annotations

from collections.abc import Container
from heapq import heapify, heappop, heappush, heapreplace

from policies.views import ExpertId


class Ranking:
    """A lazy heap. ``rank`` holds the members' present ranks; ties go to the lower id.

    Ranks that only ever grow may be written to ``rank`` directly, since entries that come up too low are corrected
    then. A rank that may fall needs ``put``.
    """

    __slots__ = ("_heap", "rank")

    def __init__(self) -> None:
        self.rank: dict[ExpertId, int] = {}
        self._heap: list[tuple[int, ExpertId]] = []

    def put(self, id: ExpertId, rank: int) -> None:
        """Make ``id`` a member, or change its rank."""
        self.rank[id] = rank
        if len(self._heap) > 4 * len(self.rank) + 16:
            self._heap = [(rank, id) for id, rank in self.rank.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (rank, id))

    def drop(self, id: ExpertId) -> None:
        """``id`` is no longer a member."""
        del self.rank[id]

    def lowest(self, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member of least rank that is not blocked, or None."""
        heap, rank = self._heap, self.rank
        skipped = []
        found = None
        while heap:
            entry = heap[0]
            known, id = entry
            now = rank.get(id)
            if now == known:
                if id not in blocked:
                    found = id
                    break
                skipped.append(heappop(heap))
            elif now is not None and now > known:
                heapreplace(heap, (now, id))
            else:
                heappop(heap)
        for entry in skipped:
            heappush(heap, entry)
        return found
