"""The page of ``measure --engine``: times of an engine's tokens and prompts, with their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realrun.llama_cpp.bench_engine import BenchPoint, BenchSettings, quartiles

HEADERS = ("", "tokens/s", "ms\nmedian", "ms\nquartiles", "+/-", "repeats")
MEANINGS = {
    "+/-": "half of the distance between the quartiles, over the median",
    "decode": "one token behind those in the cache; random ids, so that there is no text",
}


@dataclass(frozen=True)
class EngineTimes:
    """Quartiles of the repeats of one piece of work."""

    tokens: int
    low_ms: float
    median_ms: float
    high_ms: float
    repeats: int

    @classmethod
    def of(cls, point: BenchPoint, times: Sequence[int]) -> EngineTimes:
        """From times in ns."""
        low, middle, high = (ns / 1e6 for ns in quartiles(times))
        return cls(point.tokens, low, middle, high, len(times))

    @property
    def tokens_per_s(self) -> float:
        """At the median."""
        return 1e3 * self.tokens / self.median_ms

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, over the median."""
        return (self.high_ms - self.low_ms) / 2 / self.median_ms

    def cells(self) -> list[str]:
        """Those of ``HEADERS``, but for the first."""
        return [f"{self.tokens_per_s:.1f}", f"{self.median_ms:.2f}", f"{self.low_ms:.2f}-{self.high_ms:.2f}",
                f"{self.spread:.1%}", str(self.repeats)]  # fmt: skip

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"tokens_per_s": self.tokens_per_s, **vars(self), "spread": self.spread}


def times_by_work(times: Mapping[BenchPoint, Sequence[int]]) -> dict[str, EngineTimes]:
    """The times of each point, in ns, by what is computed."""
    return {_work(point): EngineTimes.of(point, ns) for point, ns in times.items()}


def times_rows(found: Mapping[str, EngineTimes]) -> list[list[str]]:
    """Lines of a table with ``HEADERS``."""
    return [[work, *each.cells()] for work, each in found.items()]


def times_document(found: Mapping[str, EngineTimes]) -> dict[str, Any]:
    """For JSON."""
    return {work: each.to_dict() for work, each in found.items()}


def settings_line(threads: int, settings: BenchSettings) -> str:
    """How the engine ran, in words."""
    where = f"experts of {settings.cpu_layers} layers on the CPU" if settings.gpu else "all on the CPU"
    many = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{where}, {many}, pieces of {settings.piece_tokens}, keys and values in {settings.kv}"


def _work(point: BenchPoint) -> str:
    return f"prompt of {point.tokens:,}" if point.tokens > 1 else f"decode at {point.depth:,} tokens"
