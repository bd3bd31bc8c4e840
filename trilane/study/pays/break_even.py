"""Where an idea begins to pay along a line of a map: gains at some values, with straight lines in between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Range(NamedTuple):
    """Values between which an idea pays; None: up to the end of the map."""

    low: float | None
    high: float | None


def paying(values: Sequence[float], gains: Sequence[float | None], worth: float) -> list[Range]:
    """The ranges of ascending ``values`` in which gains are above ``worth``; values without a gain are left out."""
    known = [(value, gain - worth) for value, gain in zip(values, gains, strict=True) if gain is not None]
    if not known:
        return []
    ranges, low = [], None
    for (left, before), (right, after) in pairwise(known):
        if (before > 0) == (after > 0):
            continue
        crossing = left + (right - left) * before / (before - after)
        if before > 0:
            ranges.append(Range(low, crossing))
        low = crossing
    return [*ranges, Range(low, None)] if known[-1][1] > 0 else ranges
