"""Belady's clairvoyant caches: evict the expert whose next use is farthest away. Built from the future of the same run.

The unit is the event: the experts that a layer uses in a step are looked up together and admitted together, and are not
evicted meanwhile. With equal sizes no cache that admits on demand alone has fewer misses than the one with bypass; with
unequal sizes neither is a bound.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from policies.mechanism.views import ExpertId, LayerView
from policies.parts.caches import RankedCache
from policies.parts.future import NEVER, Future


class BeladyCache(RankedCache):
    """Always admits; evicts the member whose next use is farthest away, ties to the lower id.

    Raises PolicyError as soon as the run is not the one that ``future`` describes.
    """

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = future
        self._place = 0
        self._next = dict(future.first_use)

    def observe(self, view: LayerView) -> None:
        """Advance by one event and take up its experts' next uses."""
        place = self._place
        self._future.check(place, view)
        self._place = place + 1
        uses, home = self._future.next_uses[place], self._home
        self._next.update(uses)
        members = {key: -use for key, use in uses if key in home}
        if members:  # of one layer, and so of one group
            home[next(iter(members))].change(members)

    def order(self, incoming: Sequence[ExpertId]) -> Sequence[ExpertId]:
        """Soonest next use first: where not all find room, these are the ones to keep."""
        return sorted(incoming, key=self.next_use) if len(incoming) > 1 else incoming

    def next_use(self, key: ExpertId) -> int:
        """The next use of ``key``, as ``Future`` counts them."""
        return self._next.get(key, NEVER)

    def rank_of(self, key: ExpertId) -> int:
        """The later the next use, the lower."""
        return -self.next_use(key)


class BeladyBypassCache(BeladyCache):
    """Belady's cache with bypass: an expert is admitted only if it is used again before the one it would displace."""

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member used again last, if that is later than ``incoming``; else None."""
        farthest = super().victim(incoming, group, blocked)
        if farthest is None or self.next_use(incoming) >= self.next_use(farthest):
            return None
        return farthest
