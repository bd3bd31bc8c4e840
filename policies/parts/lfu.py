"""Least frequently used."""

from __future__ import annotations

from policies.mechanism.views import ExpertId, LayerView
from policies.parts.ranking import RankedCache

_TICKS = 1 << 40  # more events than a run can have: frequency decides, then recency


class LfuCache(RankedCache):
    """Evicts who was used in the fewest events; ties go to the less recently used, then to the lower id.

    ``history``: counts go on while an expert is out of the cache ("perfect" LFU). Without it an expert starts at zero
    whenever it comes in (MoE-Infinity's in-cache visit count). ``recency``: without it, ties go to the lower expert,
    then to the lower layer, whoever was used last (the order in which MoE-Infinity's released code scans).
    """

    def __init__(self, history: bool = True, recency: bool = True) -> None:
        super().__init__()
        self.history = history
        self.recency = recency
        self._rank: dict[tuple[int, int], int] = {}  # uses * _TICKS + last event, or expert
        self._event = 0

    def observe(self, view: LayerView) -> None:
        """Count one use of every active expert; ranks only grow, so the heap is corrected when it is asked."""
        self._event += 1
        layer, home, rank, event = view.layer, self._home, self._rank, self._event
        for expert in view.routing.active:
            id = (layer, expert)
            group = home.get(id)
            if group is not None or self.history:
                tie = event if self.recency else expert
                now = rank[id] = (rank.get(id, 0) // _TICKS + 1) * _TICKS + tie
                if group is not None:
                    group.rank[id] = now  # type: ignore[index]  # equal to its ExpertId, and cheaper

    def rank_of(self, id: ExpertId) -> int:
        """Uses first; it comes in with its history, or from zero."""
        return self._rank[id]

    def admitted(self, id: ExpertId, group: int) -> None:
        """Join the group; a first admission counts as used last now."""
        self._rank.setdefault(id, self._event if self.recency else id.expert)
        super().admitted(id, group)

    def evicted(self, id: ExpertId, group: int) -> None:
        """Leave the group; without history also the count."""
        super().evicted(id, group)
        if not self.history:
            del self._rank[id]
