"""The page of ``measure --engine``: times of an engine's tokens and prompts, with their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from realrun.llama_cpp.bench import BenchPoint, BenchSettings, quartiles
from trilane.output.pages.output import Part, legend, table

_HEADERS = ("", "tokens/s", "ms\nmedian", "ms\nquartiles", "+/-", "repeats")
_MEANINGS = {
    "+/-": "half of the distance between the quartiles, over the median",
    "decode": "one token behind those in the cache; random ids, so that there is no text",
}


def times_of(point: BenchPoint, times: Sequence[int]) -> dict[str, float]:
    """Quartiles of the repeats (ns) of one piece of work, in ms; its speed at the median; JSON-ready."""
    low, middle, high = (ns / 1e6 for ns in quartiles(times))
    return {
        "tokens_per_s": 1e3 * point.tokens / middle, "tokens": point.tokens, "low_ms": low, "median_ms": middle,
        "high_ms": high, "repeats": len(times), "spread": (high - low) / 2 / middle,
    }


def engine_times_table(times_by_work: Mapping[str, Mapping[str, float]]) -> list[Part]:
    """Results of ``times_of``, by what is computed, with the meaning of the columns."""
    rows = [
        [work, f"{times['tokens_per_s']:.1f}", f"{times['median_ms']:.2f}",
         f"{times['low_ms']:.2f}-{times['high_ms']:.2f}", f"{times['spread']:.1%}", str(times["repeats"])]
        for work, times in times_by_work.items()
    ]
    return [table(_HEADERS, rows), legend(_MEANINGS)]


def settings_line(threads: int, settings: BenchSettings) -> str:
    """How the engine ran, in words."""
    where = f"experts of {settings.cpu_layers} layers on the CPU" if settings.gpu else "all on the CPU"
    many = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{where}, {many}, pieces of {settings.piece_tokens}, keys and values in {settings.kv}"


def work_words(point: BenchPoint) -> str:
    """Words for what is computed."""
    return f"prompt of {point.tokens:,}" if point.tokens > 1 else f"decode at {point.depth:,} tokens"
