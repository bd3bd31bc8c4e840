"""What a benchmark asks of an engine: to load a model, and to say how long it computes some tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np


class BenchContext(Protocol):
    """A loaded model with a KV cache of one sequence."""

    def compute_ns(self, tokens: int) -> int:
        """Compute so many random tokens behind those in the cache, and the time that it took."""
        ...

    def fill(self, tokens: int) -> None:
        """Fill the cache with random tokens, until it has so many."""
        ...

    def keep(self, tokens: int) -> None:
        """Take all but the first ``tokens`` out of the cache."""
        ...

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads from now on."""
        ...


class BenchSettings(NamedTuple):
    """How a model is loaded. ``gpu``: onto a GPU, but for the experts of the first ``cpu_layers`` layers; ``kv``: the
    format of keys and values; ``mapped``: out of a mapped file, rather than one that is read into pinned memory;
    ``copies``: the cache is filled with copies of its first tokens, since to compute thousands takes minutes."""

    context_tokens: int
    piece_tokens: int = 512
    gpu: bool = False
    cpu_layers: int = 0
    kv: str = "f16"
    mapped: bool = True
    copies: bool = False


OpenModel = Callable[[Path, BenchSettings], AbstractContextManager[BenchContext]]


_WARM, _FEW = 2, 16


class BenchPoint(NamedTuple):
    """One thing to time: ``tokens`` computed at once, with ``depth`` others in the cache."""

    threads: int
    depth: int
    tokens: int


def time_points(context: BenchContext, points: Iterable[tuple[BenchPoint, int]]) -> dict[BenchPoint, list[int]]:
    """Times in ns of each point, as often as stated; single tokens, and few, are computed twice before.

    The cache is empty at first, and grows or shrinks from point to point. A point that is listed again is timed again.
    """
    found: dict[BenchPoint, list[int]] = {}
    depth = 0
    for point, repeats in points:
        context.use_threads(point.threads)
        if point.depth > depth:
            context.fill(point.depth)
        elif point.depth < depth:
            context.keep(point.depth)
        depth = point.depth
        for _ in range(_WARM if point.tokens <= _FEW else 0):
            _once(context, point)
        found[point] = found.get(point, []) + [_once(context, point) for _ in range(repeats)]
    return found


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of one value, that."""
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def _once(context: BenchContext, point: BenchPoint) -> int:
    ns = context.compute_ns(point.tokens)
    context.keep(point.depth)
    return ns
