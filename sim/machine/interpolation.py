"""Tables of measured times: medians with their quartiles at some points, and straight lines between the points.

Below its first point a table keeps the first value; beyond its last one it goes on with the slope of its last segment,
or level where that falls. A table of one point is level everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from sim.machine.plausibility import HardwareError
from trilane.common.hints import ASCENDING, NOT_EMPTY, Count, between

MAX_NS = 10**15  # eleven days: a longer time is an error
Ns = Annotated[int, between(0, MAX_NS)]
Axis = Annotated[tuple[Count, ...], NOT_EMPTY, ASCENDING]
Rows = tuple[tuple[Ns, ...], ...]


def whole(number: float) -> int:
    """``number`` >= 0 as a whole one, half up."""
    return int(number + 0.5)


def time_ns(ns: float) -> int:
    """Whole ns, half up, at least 1."""
    return max(whole(ns), 1)


def table_ns(ns: NDArray[np.float64]) -> tuple[int, ...]:
    """Whole ns by workload, never less for more tokens; no tokens, no time.

    Measured products need not rise: in 32 bits one of two rows may take longer than one of four.
    """
    _, *rising = np.maximum.accumulate(np.maximum(np.floor(ns + 0.5).astype(np.int64), 1)).tolist()
    return (0, *rising)


def on_line(at: Sequence[int], values: Sequence[float], x: float) -> float:
    """The value at ``x`` of the line through the points (``at``, ascending; ``values``)."""
    if x <= at[0] or len(at) == 1:
        return values[0]
    right = min(bisect_right(at, x), len(at) - 1)
    rise, width = values[right] - values[right - 1], at[right] - at[right - 1]
    if x > at[-1]:
        return values[-1] + max(rise, 0) * (x - at[-1]) / width
    return values[right - 1] + rise * (x - at[right - 1]) / width


@dataclass(frozen=True)
class Measured:
    """One time in ns: the median of repeated measurements and their quartiles."""

    ns: Ns
    low: Ns
    high: Ns

    def __post_init__(self) -> None:
        check_quartiles(1, [self.ns], [self.low], [self.high])


@dataclass(frozen=True)
class Table:
    """Times in ns by one size, such as tokens: ``ns[i]`` at ``at[i]``, with quartiles ``low`` and ``high``."""

    at: Axis
    ns: tuple[Ns, ...]
    low: tuple[Ns, ...]
    high: tuple[Ns, ...]

    def __post_init__(self) -> None:
        check_quartiles(len(self.at), self.ns, self.low, self.high)

    def __call__(self, size: float) -> float:
        """ns at ``size``, measured or between (module docstring)."""
        return on_line(self.at, self.ns, size)


class TimeGrid(ABC):
    """Times in ns by two sizes: ``ns[i][j]`` for ``batch[i]`` sequences of ``length[j]`` tokens each.

    Lines between points in both directions: along ``length`` first, then along ``batch``.
    """

    batch: Axis
    ns: Rows
    low: Rows
    high: Rows

    @property
    @abstractmethod
    def length(self) -> Axis:
        """Tokens of each sequence."""

    def __post_init__(self) -> None:
        for _, *row in zip_longest(self.batch, self.ns, self.low, self.high, fillvalue=()):
            check_quartiles(len(self.length), *row)

    def __call__(self, batch: float, length: float) -> float:
        """ns for ``batch`` sequences of ``length`` tokens each, measured or between (module docstring)."""
        return on_line(self.batch, [on_line(self.length, row, length) for row in self.ns], batch)


@dataclass(frozen=True)
class DecodeGrid(TimeGrid):
    """Times of one new token per sequence, by the length of its KV cache with that token in it."""

    batch: Axis
    context: Axis
    ns: Rows
    low: Rows
    high: Rows

    @property
    def length(self) -> Axis:
        return self.context


@dataclass(frozen=True)
class PrefillGrid(TimeGrid):
    """Times of the new tokens of each sequence, with nothing before them."""

    batch: Axis
    tokens: Axis
    ns: Rows
    low: Rows
    high: Rows

    @property
    def length(self) -> Axis:
        return self.tokens


def check_quartiles(points: int, middle: Sequence[int], low: Sequence[int], high: Sequence[int]) -> None:
    """Refuse times that are not one per point, and a median that is not between its quartiles. Raises HardwareError."""
    if not points == len(middle) == len(low) == len(high):
        raise HardwareError(
            f"expected {points} entries of ns, low and high, one for each point, got {len(middle)}, {len(low)} and "
            f"{len(high)}"
        )
    for m, a, b in zip(middle, low, high, strict=True):
        if not a <= m <= b:
            raise HardwareError(f"expected low <= median <= high, got {a}, {m}, {b}")
