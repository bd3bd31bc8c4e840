"""Repeated measurements: after a warm-up, and in rounds, so that a period of noise affects all quantities; and their
medians and quartiles in tables (``sim.machine.interpolation``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from sim.machine.interpolation import Measured, Table, TimeGrid, whole
from sim.machine.profile import MeasuredRate

Grid = TypeVar("Grid", bound=TimeGrid)

Key: TypeAlias = tuple[str | int, ...]  # a quantity's name, then the sizes that it was measured with
Samples: TypeAlias = dict[Key, list[float]]
Probe: TypeAlias = Callable[[], Mapping[Key, Sequence[float]]]  # measures once: ns of one quantity or several


@dataclass(frozen=True)
class Effort:
    """Number of repeats of a probe: at least one per round, and up to ``most`` within ``probe_ns``."""

    rounds: int = 7
    most: int = 8
    probe_ns: int = 50_000_000


QUICK = Effort(rounds=3, most=4, probe_ns=15_000_000)


def repeated(probes: Sequence[Probe], effort: Effort, now_ns: Callable[[], int]) -> Samples:
    """The samples of all probes, run back and forth in rounds after a first, discarded run."""
    samples: Samples = defaultdict(list)
    for probe in probes:
        probe()
    for turn in range(effort.rounds):
        for probe in probes if turn % 2 == 0 else reversed(probes):
            for times_ns in _often(probe, effort, now_ns):
                for key, ns in times_ns.items():
                    samples[key].extend(ns)
    return samples


def _often(probe: Probe, effort: Effort, now_ns: Callable[[], int]) -> Iterator[Mapping[Key, Sequence[float]]]:
    began_ns = now_ns()
    for _ in range(effort.most):
        yield probe()
        if now_ns() - began_ns >= effort.probe_ns:
            return


def whole_quartiles(samples: Sequence[float]) -> tuple[int, int, int]:
    """Median, first and third quartile of repeated measurements, whole. Raises ValueError where there are none."""
    if not len(samples):
        raise ValueError("quartiles: expected at least one measurement, got none")
    median, low, high = (whole(float(ns)) for ns in np.quantile(samples, (0.5, 0.25, 0.75)))
    return median, low, high


def measured_time(samples: Sequence[float]) -> Measured:
    """Median and quartiles of samples in ns."""
    return Measured(*whole_quartiles(samples))


def measured_rate(samples: Sequence[float]) -> MeasuredRate:
    """Median and quartiles of samples in permille, at most 1000: more is noise, since running together never helps."""
    return MeasuredRate(*(min(max(value, 1), 1000) for value in whole_quartiles(samples)))


def measured_table(samples: Mapping[int, Sequence[float]]) -> Table:
    """Medians and quartiles of the samples in ns of every size."""
    at = tuple(sorted(samples))
    return Table(at, *_columns([whole_quartiles(samples[size]) for size in at]))


def measured_grid(kind: type[Grid], samples: Mapping[tuple[int, int], Sequence[float]]) -> Grid:
    """Medians and quartiles of the samples in ns of every (batch, length)."""
    batches, lengths = (tuple(sorted(set(sizes))) for sizes in zip(*samples, strict=True))
    rows = [_columns([whole_quartiles(samples.get((b, n), ())) for n in lengths]) for b in batches]
    made: Callable[..., Grid] = kind
    return made(batches, lengths, *_columns(rows))


def _columns(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """(a, b, c) of every row as all a, all b, all c."""
    return tuple(zip(*rows, strict=True))
