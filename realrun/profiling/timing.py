"""Repeated measurements: after a warm-up, and in rounds, so that a period of noise affects all quantities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Key: TypeAlias = tuple[str | int, ...]  # a quantity's name, then the sizes that it was measured with
Samples: TypeAlias = dict[Key, list[float]]
Probe: TypeAlias = Callable[[], Mapping[Key, Sequence[float]]]  # measures once: ns of one quantity or several


@dataclass(frozen=True)
class Effort:
    """How often a probe is repeated: at least once per round, and up to ``most`` times within ``probe_ns``."""

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
            for found in _often(probe, effort, now_ns):
                for key, ns in found.items():
                    samples[key].extend(ns)
    return samples


def _often(probe: Probe, effort: Effort, now_ns: Callable[[], int]) -> Iterator[Mapping[Key, Sequence[float]]]:
    began = now_ns()
    for _ in range(effort.most):
        yield probe()
        if now_ns() - began >= effort.probe_ns:
            return
