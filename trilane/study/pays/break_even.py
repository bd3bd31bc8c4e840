"""Break-even: the ranges of a number in which its gain is above what is worth it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

End = float | tuple[float, float]  # an interpolated value, or two neighbours of which no value between is known


class Range(NamedTuple):
    """Values between which an idea pays; None: up to the end of those that have a gain."""

    low: End | None
    high: End | None


class GainAt(NamedTuple):
    """A value, its gain above what is worth it, and whether a side jumps between it and the value before."""

    value: float
    gain: float | None
    jumps: bool = False


def paying(steps: Sequence[GainAt]) -> list[Range]:
    """The ranges in which gains are above 0, of ascending values; straight lines in between, but none over a jump.

    No line crosses a value without a gain between two that have one: a range ends before it.
    """
    runs = [[*group] for known, group in groupby(steps, key=lambda step: step.gain is not None) if known]
    ranges: list[Range] = []
    for place, run in enumerate(runs):
        low = run[0].value if place else None
        ranges += _within(run, low, run[-1].value if place + 1 < len(runs) else None)
    return ranges


def _within(run: Sequence[GainAt], low: End | None, high: End | None) -> Iterator[Range]:
    """The ranges of neighbours, that begin at ``low`` and end at ``high``."""
    for (left, before, _), (right, after, jumps) in pairwise(run):
        assert before is not None
        assert after is not None
        if (before > 0) != (after > 0):
            crossing = (left, right) if jumps else left + (right - left) * before / (before - after)
            if before > 0:
                yield Range(low, crossing)
            low = crossing
    if (run[-1].gain or 0.0) > 0:
        yield Range(low, high)
