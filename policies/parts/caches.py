"""What caches have in common, and the two that learn nothing: static and random."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence

from policies.mechanism.views import ExpertId, LayerView, Swap
from policies.protocols import When


class DemandCache:
    """A cache that changes only by admitting copies: no swaps, admissions in the order of the copies."""

    admits = True

    def observe(self, view: LayerView) -> None:
        """Learn nothing."""

    def order(self, incoming: Sequence[ExpertId]) -> Sequence[ExpertId]:
        """As they come."""
        return incoming

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        """None."""
        return ()


class StaticCache(DemandCache):
    """Stays as it was placed; what is loaded passes through staging."""

    admits = False

    def admitted(self, id: ExpertId, group: int) -> None:
        """Only the initial placement comes here."""

    def evicted(self, id: ExpertId, group: int) -> None:
        """Never happens by this cache's doing."""

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """Nobody leaves."""
        return None


class RandomCache(DemandCache):
    """Evicts a member drawn uniformly among those not blocked: the floor that a cache has to beat."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._members: dict[int, list[ExpertId]] = {}
        self._place: dict[ExpertId, int] = {}

    def admitted(self, id: ExpertId, group: int) -> None:
        """Put it last."""
        members = self._members.setdefault(group, [])
        self._place[id] = len(members)
        members.append(id)

    def evicted(self, id: ExpertId, group: int) -> None:
        """Fill its place with the last member."""
        members, place = self._members[group], self._place.pop(id)
        last = members.pop()
        if last != id:
            members[place] = last
            self._place[last] = place

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """Draw; after a few blocked ones, draw among the others alone."""
        members = self._members.get(group, [])
        for _ in range(4 if members else 0):
            id = members[int(self._draw.random() * len(members))]
            if id not in blocked:
                return id
        free = [id for id in members if id not in blocked]
        return self._draw.choice(free) if free else None
