"""Victims of copies: what leaves the cache for them, and that it leaves in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from policies.mechanism.views import ExpertId

Victims: TypeAlias = tuple[ExpertId, ...] | None  # of a copy; None: no cache slot
Slots: TypeAlias = dict[ExpertId, Victims]


def victims_in_time(
    slots: Slots, copies: Sequence[ExpertId], free: int, size_of: Callable[[ExpertId], int]
) -> Slots:
    """Return ``slots`` with victims moved to earlier ``copies`` that would start before there is room.

    In a group of experts of different size, the first one served may evict more than it takes, and another that is
    copied sooner may have been promised the rest.
    """
    pending = [victim for victims in slots.values() for victim in victims or ()]
    timely = dict(slots)
    for key in copies:
        if slots[key] is None:
            continue
        mine = [victim for victim in slots[key] or () if victim in pending]
        others = (victim for victim in pending if victim not in mine)
        free -= size_of(key) - sum(size_of(victim) for victim in mine)
        while free < 0:
            victim = next(others)
            mine.append(victim)
            free += size_of(victim)
        pending = [victim for victim in pending if victim not in mine]
        timely[key] = tuple(mine)
    return timely
