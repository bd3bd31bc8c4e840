"""Measured times of an earlier validation of an engine, predicted anew: with another profile, or another model."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from realrun.llama_cpp.bench_engine import BenchPoint
from sim.costs.engine import InferenceEngine
from sim.machine.hardware import Hardware
from traces.models.catalogue import load_model
from trilane.common.errors import TrilaneError
from trilane.common.quoting import quoted
from trilane.study.validation.engine_plan import EngineScenario
from trilane.study.validation.engine_rows import COLUMNS, EngineRow, null_ns, predicted_ns

_FROM_0 = ("n_cpu_moe", "depth")
_WHOLE = (*_FROM_0, "threads", "tokens", "repeats")
_MOST = 1_000_000_000  # of whole numbers, and of milliseconds


class EarlierRowsError(TrilaneError):
    """A file that is no table of an engine's validation."""


def read_rows(path: Path) -> list[EngineRow]:
    """The rows of a report's ``rows.csv``. Raises EarlierRowsError naming the file and the line, and OSError."""
    try:
        with path.open(newline="", encoding="ascii") as file:
            reader = csv.DictReader(file, strict=True)
            if reader.fieldnames != list(COLUMNS):
                raise EarlierRowsError(f"{path}: expected the columns {', '.join(COLUMNS)}, as in a report's rows.csv")
            rows = [_row(line, f"{path}, line {reader.line_num}") for line in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise EarlierRowsError(f"{path}: expected a table in ASCII with commas: {error}") from None
    if not rows:
        raise EarlierRowsError(f"{path}: expected at least one row")
    return rows


def predicted_anew(row: EngineRow, hardware: Hardware, engine: InferenceEngine) -> EngineRow:
    """The same measurement with what ``engine`` predicts, and the null model on ``hardware``. Raises what the model's
    name and the predictions raise."""
    if hardware.cpu_only != (row.n_cpu_moe is None):
        with_gpu, asked = ("without", "with") if row.n_cpu_moe is None else ("with", "without")
        raise EarlierRowsError(
            f"{row.model}: measured {with_gpu} a GPU, expected a plan for such a machine, got {hardware.name!r} "
            f"{asked} one"
        )
    shape = load_model(row.model)
    scenario = EngineScenario(row.model, BenchPoint(row.threads, row.depth, row.tokens), row.n_cpu_moe)
    return replace(
        row, predicted_ms=round(predicted_ns(shape, hardware, engine, scenario) / 1e6, 4),
        null_ms=round(null_ns(shape, hardware, engine, scenario) / 1e6, 4),
    )  # fmt: skip


def _row(line: Mapping[str | Any, str | Any], where: str) -> EngineRow:
    if None in line or None in line.values():
        raise EarlierRowsError(f"{where}: expected {len(COLUMNS)} columns")
    values: dict[str, Any] = {"model": line["model"]}
    for name in COLUMNS[1:-1]:  # the last is the error, which follows from the others
        kind: Callable[[str], float] = int if name in _WHOLE else float
        none = name == "n_cpu_moe" and line[name] == ""
        values[name] = None if none else _number(kind, line[name], 0 if name in _FROM_0 else 1e-9, f"{where}, {name}")
    return EngineRow(**values)


def _number(kind: Callable[[str], float], text: str, least: float, where: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= _MOST:
        raise EarlierRowsError(f"{where}: expected a number from {least:g} to {_MOST:,}, got {quoted(text)}")
    return value
