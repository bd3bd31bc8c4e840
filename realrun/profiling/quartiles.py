"""Tables of repeated measurements: median and quartiles of the samples of each size (``sim.machine.interpolation``).

Each function raises ValueError where there are no samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from sim.machine.interpolation import Measured, Table, TimeGrid, whole
from sim.machine.profile import MeasuredRate

Grid = TypeVar("Grid", bound=TimeGrid)


def whole_quartiles(samples: Sequence[float]) -> tuple[int, int, int]:
    """Median, first and third quartile of repeated measurements, whole."""
    if not len(samples):
        raise ValueError("quartiles: expected at least one measurement, got none")
    median, low, high = (whole(float(ns)) for ns in np.quantile(samples, (0.5, 0.25, 0.75)))
    return median, low, high


def measured_time(samples: Sequence[float]) -> Measured:
    """From ns."""
    return Measured(*whole_quartiles(samples))


def measured_rate(samples: Sequence[float]) -> MeasuredRate:
    """From permille; what lies above 1000 is noise, since running together never helps."""
    return MeasuredRate(*(min(max(value, 1), 1000) for value in whole_quartiles(samples)))


def measured_table(samples: Mapping[int, Sequence[float]]) -> Table:
    """From the ns of every size."""
    at = tuple(sorted(samples))
    return Table(at, *_columns([whole_quartiles(samples[size]) for size in at]))


def measured_grid(kind: type[Grid], samples: Mapping[tuple[int, int], Sequence[float]]) -> Grid:
    """From the ns of every (batch, length)."""
    batches, lengths = (tuple(sorted(set(sizes))) for sizes in zip(*samples, strict=True))
    rows = [_columns([whole_quartiles(samples.get((b, n), ())) for n in lengths]) for b in batches]
    made: Callable[..., Grid] = kind
    return made(batches, lengths, *_columns(rows))


def _columns(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """(a, b, c) of every row as all a, all b, all c."""
    return tuple(zip(*rows, strict=True))
