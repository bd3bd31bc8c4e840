"""Where an idea begins to pay along a line of a map: gains at some values, with straight lines in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

Known = tuple[float, float]  # a value, and by how much its gain is above what is worth it


class Range(NamedTuple):
    """Values between which an idea pays; None: up to the end of those that have a gain."""

    low: float | None
    high: float | None


def paying(values: Sequence[float], gains: Sequence[float | None], worth: float) -> list[Range]:
    """The ranges of ascending ``values`` in which gains are above ``worth``.

    No line crosses a value without a gain between two that have one: a range ends before it.
    """
    runs = _runs(values, gains, worth)
    ranges: list[Range] = []
    for place, run in enumerate(runs):
        low = run[0][0] if place else None
        ranges += _within(run, low, run[-1][0] if place + 1 < len(runs) else None)
    return ranges


def _runs(values: Sequence[float], gains: Sequence[float | None], worth: float) -> list[list[Known]]:
    """Neighbours that have a gain."""
    pairs = list(zip(values, gains, strict=True))
    groups = groupby(pairs, key=lambda pair: pair[1] is not None)
    return [[(value, gain - worth) for value, gain in group if gain is not None] for known, group in groups if known]


def _within(run: Sequence[Known], low: float | None, high: float | None) -> Iterator[Range]:
    """The ranges of neighbours, that begin at ``low`` and end at ``high``."""
    for (left, before), (right, after) in pairwise(run):
        if (before > 0) != (after > 0):
            crossing = left + (right - left) * before / (before - after)
            if before > 0:
                yield Range(low, crossing)
            low = crossing
    if run[-1][1] > 0:
        yield Range(low, high)
