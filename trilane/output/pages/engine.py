"""Pages of an engine on this machine: the times of its tokens and prompts, and the report of its validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from realrun.llama_cpp.bench import BenchPoint, BenchSettings, quartiles
from sim.costs.engine import InferenceEngine
from trilane.common.files import atomic_path
from trilane.output.pages.output import Part, bullets, heading, legend, markdown_table, signed_percent, table
from trilane.study.validation.engine_validation import (
    MEDIAN_AIM,
    QUIET,
    WORST_AIM,
    EngineRow,
    EngineSummary,
    write_rows,
)

_TIMES_HEADERS = ("", "tokens/s", "ms\nmedian", "ms\nquartiles", "+/-", "repeats")
_TIMES_MEANINGS = {
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
    return [table(_TIMES_HEADERS, rows), legend(_TIMES_MEANINGS)]


def settings_line(threads: int, settings: BenchSettings) -> str:
    """How the engine ran, in words."""
    where = f"experts of {settings.cpu_layers} layers on the CPU" if settings.gpu else "all on the CPU"
    many = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{where}, {many}, pieces of {settings.piece_tokens}, keys and values in {settings.kv}"


def work_words(point: BenchPoint) -> str:
    """Words for what is computed."""
    return f"prompt of {point.tokens:,}" if point.tokens > 1 else f"decode at {point.depth:,} tokens"


# --- validation -------------------------------------------------------------------------------------------------------

_MEANINGS = {
    "measured": "median time of a step: one token behind `depth` others, or a piece of a prompt of so many tokens",
    "+/-": "half of the distance between the quartiles of the repeats, over the median",
    "error": "predicted / measured - 1; null: the same of the null model, which has bytes, products and two rates",
}
_HEADERS = ("threads", "depth", "tokens", "ms\nmeasured", "+/-", "ms\npredicted", "error", "null\nerror")


def engine_page(rows: Sequence[EngineRow], predicted_by: str) -> list[Part]:
    """The page on a terminal: a table of all scenarios, and the errors in words."""
    title = heading(f"{len(rows)} scenarios, predicted by {predicted_by}")
    return [title, table(*engine_table(rows)), legend(_MEANINGS), "", *summary_lines(EngineSummary.of(rows))]


def engine_table(rows: Sequence[EngineRow]) -> tuple[list[str], list[list[str]]]:
    """Headers, and a line of text cells for each scenario; with ``--n-cpu-moe`` where there is a GPU."""
    if all(row.n_cpu_moe is None for row in rows):
        return ["model", *_HEADERS], [[row.model, *_line(row)] for row in rows]
    return ["model", "--n-cpu-moe", *_HEADERS], [[row.model, str(row.n_cpu_moe), *_line(row)] for row in rows]


def summary_lines(found: EngineSummary) -> list[str]:
    """The verdicts, then the errors by kind of work."""
    verdicts = [
        f"{'held' if error <= aim else 'not held'}: {name} error {error:.1%} of {found.rows} scenarios (aim: at most "
        f"{aim:.0%})"
        for name, error, aim in (("median", found.median_error, MEDIAN_AIM), ("worst", found.worst_error, WORST_AIM))
    ]
    works = [
        f"{work}: median error {error:.1%}, with its sign {signed:+.1%} ({rows} scenarios)"
        for work, (rows, error, signed) in found.by_work.items()
    ]
    spread = (
        f"null model: median error {found.median_null_error:.0%}; spread of repeats {found.median_spread:.1%} (median)"
    )
    quiet = (
        f"the {found.quiet_rows} scenarios whose repeats spread by less than {QUIET:.0%}: median error "
        f"{found.quiet_median_error:.1%}, worst {found.quiet_worst_error:.1%}"
    )
    return [*verdicts, quiet, spread, *works]


def write_engine_report(rows: Sequence[EngineRow], folder: Path, engine: InferenceEngine, machine: str) -> None:
    """report.md, rows.csv and scatter.png in ``folder``."""
    from trilane.output.figures import plot_engine, save_figure

    folder.mkdir(parents=True, exist_ok=True)
    write_rows(rows, folder / "rows.csv")
    save_figure(plot_engine(rows, machine), folder / "scatter.png")
    far = [row for row in sorted(rows, key=lambda row: -abs(row.error)) if abs(row.error) > WORST_AIM]
    parts = [
        "# llama.cpp, predicted and measured",
        f"{machine}. Models of random weights, all layers. Predicted by `{engine.name}`: {engine.about}.",
        bullets(summary_lines(EngineSummary.of(rows))),
        "![Predicted against measured times](scatter.png)",
        f"## Errors above {WORST_AIM:.0%}", bullets(map(_failure, far)) if far else "None.",
        "## All scenarios", markdown_table(*engine_table(rows)),
        bullets(f"*{key}*: {text}" for key, text in _MEANINGS.items()),
    ]
    with atomic_path(folder / "report.md") as aside:
        aside.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _failure(row: EngineRow) -> str:
    split = "" if row.n_cpu_moe is None else f", --n-cpu-moe {row.n_cpu_moe}"
    return (
        f"{row.model}{split}, {row.work}, {row.threads} thread{'s' * (row.threads > 1)}: {row.error:+.1%} "
        f"({row.predicted_ms:,.1f} ms predicted, {row.measured_ms:,.1f} measured, {row.low_ms:,.1f} to "
        f"{row.high_ms:,.1f})"
    )


def _line(row: EngineRow) -> list[str]:
    return [
        str(row.threads), f"{row.depth:,}", str(row.tokens), f"{row.measured_ms:,.2f}", f"{row.spread:.1%}",
        f"{row.predicted_ms:,.2f}", signed_percent(row.error), signed_percent(row.null_error),
    ]
