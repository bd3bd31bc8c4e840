"""A heap of experts whose ranks change often and whose minimum is needed rarely."""

from __future__ import annotations

from collections.abc import Container, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from policies.mechanism.views import ExpertId


class LazyHeap:
    """Members and their ranks; ties go to the lower id.

    ``rank`` holds the present ranks. One that has grown may be written there directly, since an entry of the heap that
    turns out too low is corrected when it comes up. A rank that may fall needs ``put``.
    """

    __slots__ = ("_heap", "_held", "rank")

    def __init__(self) -> None:
        self.rank: dict[ExpertId, float] = {}
        self._heap: list[tuple[float, ExpertId]] = []
        self._held: list[tuple[float, ExpertId]] = []  # taken off the heap while blocked: one event searches many times

    def put(self, key: ExpertId, rank: float) -> None:
        """Make ``key`` a member, or change its rank."""
        grows = key in self.rank and rank >= self.rank[key]
        self.rank[key] = rank
        if grows:
            return
        if len(self._heap) > 4 * len(self.rank) + 16:
            self._sort()
        else:
            heappush(self._heap, (rank, key))

    def change(self, ranks: Mapping[ExpertId, float]) -> None:
        """Change the ranks of several members."""
        if 4 * len(ranks) > len(self.rank):
            self.rank.update(ranks)
            self._sort()
        else:
            for key, rank in ranks.items():
                self.put(key, rank)

    def _sort(self) -> None:
        """Build the heap again from the present ranks."""
        self._heap, self._held = [(rank, key) for key, rank in self.rank.items()], []
        heapify(self._heap)

    def drop(self, key: ExpertId) -> None:
        del self.rank[key]

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
            known, key = heap[0]
            now = rank.get(key)
            if now == known:
                if key not in blocked:
                    return key
                self._held.append(heappop(heap))
            elif now is not None and now > known:
                heapreplace(heap, (now, key))
            else:
                heappop(heap)
        return None
