"""What a benchmark asks of an engine: to load a model, and to say how long it computes some tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol


class BenchContext(Protocol):
    """A loaded model with a KV cache of one sequence."""

    def compute_ns(self, tokens: int) -> int:
        """Compute so many random tokens behind those in the cache, and the time that it took."""
        ...

    def keep(self, tokens: int) -> None:
        """Take all but the first ``tokens`` out of the cache."""
        ...

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads from now on."""
        ...


class BenchSettings(NamedTuple):
    """How a model is loaded. ``cpu_layers``: layers whose experts stay on the CPU, where there is a GPU."""

    context_tokens: int
    piece_tokens: int = 512
    cpu_layers: int = 0


OpenModel = Callable[[Path, BenchSettings], AbstractContextManager[BenchContext]]


class Point(NamedTuple):
    """One thing to time: ``tokens`` computed at once, with ``depth`` others in the cache."""

    threads: int
    depth: int
    tokens: int


def time_points(
    context: BenchContext, points: Iterable[tuple[Point, int]], warm: int = 2
) -> dict[Point, list[int]]:
    """Times in ns of each point, as often as stated; the cache grows in the order of the points, and repeats of one point
    start from its depth. Each is computed ``warm`` times before it is timed, those of many tokens once at most.
    """
    found: dict[Point, list[int]] = {}
    depth, threads = 0, 0
    for point, repeats in points:
        if point.threads != threads:
            threads = point.threads
            context.use_threads(threads)
        depth = _fill(context, depth, point.depth)
        for _ in range(warm if point.tokens <= _FEW else 0):
            _once(context, point)
        found[point] = [_once(context, point) for _ in range(repeats)]
    return found


_FEW, _FILL_TOKENS = 16, 512


def middle(times: list[int]) -> float:
    """The median."""
    return float(median(times))


def _once(context: BenchContext, point: Point) -> int:
    ns = context.compute_ns(point.tokens)
    context.keep(point.depth)
    return ns


def _fill(context: BenchContext, depth: int, wanted: int) -> int:
    """The cache with as many tokens as wanted."""
    if wanted < depth:
        context.keep(wanted)
    while depth < wanted:
        step = min(_FILL_TOKENS, wanted - depth)
        context.compute_ns(step)
        depth += step
    return wanted
