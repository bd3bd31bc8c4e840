"""Least recently used: one cache for both, a pool over all layers or slots by layer (Mixtral-Offloading's choice)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from policies.mechanism.views import ExpertId, LayerView
from policies.parts.caches import DemandCache


class LruCache(DemandCache):
    """Evicts whose last use, or admission if it came later, is longest ago. An event's experts are used in id order,
    and its admissions come after its hits."""

    def __init__(self) -> None:
        self._groups: dict[int, OrderedDict[ExpertId, None]] = {}
        self._home: dict[tuple[int, int], OrderedDict[ExpertId, None]] = {}

    def observe(self, view: LayerView) -> None:
        """The members used become the most recent."""
        layer, home = view.layer, self._home
        for expert in view.routing.active:
            group = home.get((layer, expert))
            if group is not None:
                group.move_to_end((layer, expert))  # type: ignore[arg-type]  # equal to its ExpertId, and cheaper

    def admitted(self, id: ExpertId, group: int) -> None:
        """Comes in as the most recent."""
        home = self._home[id] = self._groups.setdefault(group, OrderedDict())
        home[id] = None

    def evicted(self, id: ExpertId, group: int) -> None:
        """Forget it."""
        del self._home.pop(id)[id]

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The least recent member that is not blocked."""
        for id in self._groups.get(group, ()):
            if id not in blocked:
                return id
        return None
