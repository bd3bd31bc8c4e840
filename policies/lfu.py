"""Least frequently used."""

from __future__ import annotations

from collections.abc import Container

from policies.caches import DemandCache
from policies.ranking import Ranking
from policies.views import ExpertId, LayerView

_TICKS = 1 << 40  # more events than a run can have: frequency decides, then recency


class LfuCache(DemandCache):
    """Evicts who was used in the fewest events; ties go to the less recently used, then to the lower id.

    ``history``: counts go on while an expert is out of the cache ("perfect" LFU). Without it an expert starts at zero
    whenever it comes in (MoE-Infinity's in-cache visit count). ``recency``: without it, ties go to the lower expert,
    then to the lower layer, whoever was used last (the order in which MoE-Infinity's released code scans).
    """

    def __init__(self, history: bool = True, recency: bool = True) -> None:
        self.history = history
        self.recency = recency
        self._groups: dict[int, Ranking] = {}
        self._home: dict[tuple[int, int], Ranking] = {}
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

    def admitted(self, id: ExpertId, group: int) -> None:
        """Comes in with its history, or from zero."""
        home = self._home[id] = self._groups.setdefault(group, Ranking())
        home.put(id, self._rank.setdefault(id, self._event if self.recency else id.expert))

    def evicted(self, id: ExpertId, group: int) -> None:
        """Leave the group; without history also the count."""
        self._home.pop(id).drop(id)
        if not self.history:
            del self._rank[id]

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The least frequent member that is not blocked."""
        ranking = self._groups.get(group)
        return ranking.lowest(blocked) if ranking else None
