"""The future of a run: what clairvoyant policies are allowed to know, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from policies.views import ExpertId, LayerView, PolicyError

Event = tuple[int, int, tuple[int, ...]]  # step, layer, active experts
NEVER = 1 << 60  # the event of a use that does not come


class Future:
    """Every layer event of a complete run, in order. An event is known by its place, 0, 1, ...

    ``first_use`` is the first event of each expert that is used at all. ``next_uses[i]`` are, for the active experts of
    event i, the events at which they are used next (``NEVER`` if they are not).
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events: tuple[Event, ...] = tuple(events)
        upcoming: dict[ExpertId, int] = {}
        next_uses = []
        for place in range(len(self.events) - 1, -1, -1):
            _, layer, active = self.events[place]
            ids = [ExpertId(layer, expert) for expert in active]
            next_uses.append(tuple(upcoming.get(id, NEVER) for id in ids))
            upcoming.update(dict.fromkeys(ids, place))
        self.next_uses = tuple(reversed(next_uses))
        self.first_use = upcoming

    def check(self, place: int, view: LayerView) -> None:
        """Raise PolicyError if ``view`` is not event ``place``: the run has left the future that it was given."""
        seen = (view.step, view.layer, view.routing.active)
        if place >= len(self.events):
            raise PolicyError(f"the future ends after {len(self.events)} events, but the run goes on with {seen[:2]}")
        if self.events[place] != seen:
            expected = self.events[place]
            raise PolicyError(f"event {place}: the future has (step, layer, active) {expected}, the run {seen}")
