"""The future of a run, for clairvoyant policies only."""

from __future__ import annotations

from collections.abc import Sequence

from policies.mechanism.views import ExpertId, LayerView, PolicyError

Event = tuple[int, int, tuple[int, ...]]  # step, layer, active experts
WIDTH = 1 << 20  # more experts than an event can have
NEVER = 1 << 62  # no further use


class Future:
    """Every layer event of a complete run, in order: event 0, 1, ...

    A use is a number that grows with time: event * ``WIDTH`` + order. Experts used in the same event are ordered by
    their following uses: the one used again sooner comes first, equals stay equal. This matters since an event's
    residents cannot be evicted: of two experts that are used together next, the resident one keeps the other one out.

    ``first_use`` holds the first use of each expert that is used at all; ``next_uses[i]`` pairs each expert of event i
    with its next use after it (``NEVER`` if there is none).
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events: tuple[Event, ...] = tuple(events)
        upcoming: dict[ExpertId, int] = {}
        next_uses = []
        known: dict[ExpertId, ExpertId] = {}  # one object for each expert
        for place in range(len(self.events) - 1, -1, -1):
            _, layer, active = self.events[place]
            ids = [known.setdefault(key, key) for key in (ExpertId(layer, expert) for expert in active)]
            uses = [upcoming.get(key, NEVER) for key in ids]
            next_uses.append(tuple(zip(ids, uses, strict=True)))
            order = {use: place * WIDTH + rank for rank, use in enumerate(sorted(set(uses)))}
            upcoming.update(zip(ids, map(order.__getitem__, uses), strict=True))
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
