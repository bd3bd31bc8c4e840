"""Errors of predicted speeds against measured ones: of all rows, and by regime, model family, format and engine.

Regimes are kinds of machine and split, in each of which other parts of a cost model decide. The error that each had on
the bundled rows is kept in ``regime_errors.csv`` for answers of ``trilane fit``. Every machine has one vote there: rigs
with many rows would weigh most otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, get_args

from sim.costs.engine import FittedEngine, load_fitted
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.csv_files import read_csv
from trilane.engines.accuracy.measured_rows import BUNDLED, MeasuredRow, RowsError, machine_of, shape_of, split_of
from trilane.engines.split_speed import StaticSplit

Regime = Literal["all GPU", "mixed", "experts on CPU", "server", "CPU only", "laptop", "Vulkan", "unified"]
REGIMES: tuple[Regime, ...] = get_args(Regime)
SERVER_BYTES_PER_S = 150e9  # theory of the DRAM: six channels of DDR4 have it, two of DDR5 do not
_MOBILE = re.compile(r"laptop|Ryzen AI|\d(U|H|HS|HX|HK)\b")
REGIME_ERRORS = Path(__file__).with_name("regime_errors.csv")
FEWEST_MACHINES = 3  # of fewer, a median says nothing


def regime_of(shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit) -> Regime:
    """The regime of a split on a machine with an engine. The kind of machine goes before that of the split."""
    if hardware.gpu.kind == "unified":
        return "unified"
    if _MOBILE.search(f"{hardware.gpu.name}, {hardware.cpu.name}"):
        return "laptop"
    if hardware.cpu_only:
        return "CPU only"
    if engine.back_end == "vulkan":
        return "Vulkan"
    if split.cpu_layers == 0:
        return "all GPU"
    if hardware.cpu.dram_bytes_per_s > SERVER_BYTES_PER_S:
        return "server"
    return "experts on CPU" if split.cpu_layers >= shape.moe_layers and not split.gpu_experts else "mixed"


class RegimeAccuracy(NamedTuple):
    """Errors of decode speeds that were predicted without the row's machine.

    ``engine``: the program, of whichever builds; empty: all of them. ``median``: of the machines' own medians;
    ``within_25``: machines whose own is at most 25 %.
    """

    regime: str
    engine: str
    median: float
    within_25: int
    machines: int
    rows: int


def regime_error(regime: Regime, engine: FittedEngine) -> RegimeAccuracy | None:
    """The error that an engine had in a regime, or all engines where fewer than three machines ran it; None where
    fewer than three machines are of the regime."""
    of_engine = {error.engine: error for error in kept_errors() if error.regime == regime}
    errors = (of_engine.get(name) for name in (engine.scored_as, ""))
    return next((error for error in errors if error and error.machines >= FEWEST_MACHINES), None)


@cache
def kept_errors() -> tuple[RegimeAccuracy, ...]:
    """All of the file: to find the regimes of all rows takes too long for an answer."""
    return tuple(read_csv(RegimeAccuracy, REGIME_ERRORS, "the errors of regimes", RowsError))


HELD_OUT = BUNDLED.with_name("held_out.csv")
SCORED_QUALITIES = ("", "A", "B")  # C is shown apart
Quantity = Literal["decode", "prompts"]
QUANTITIES: tuple[Quantity, ...] = ("decode", "prompts")
_SIZE = re.compile(r"a?\d+(\.\d+)?b")  # 30b, a3b


class Speeds(NamedTuple):
    """Tokens a second; None where there is no such speed."""

    decode: float | None = None
    prompts: float | None = None

    def of(self, quantity: Quantity) -> float | None:
        speed: float | None = getattr(self, quantity)
        return speed


Predictions = Mapping[str, Speeds]  # by the row's id


def measured(row: MeasuredRow) -> Speeds:
    return Speeds(row.decode_tokens_per_s, row.prompt_tokens_per_s)


def error_of(row: MeasuredRow, predictions: Predictions, quantity: Quantity) -> float | None:
    """Predicted / measured - 1; None where one of them is missing."""
    predicted, actual = predictions.get(row.id, Speeds()).of(quantity), measured(row).of(quantity)
    return None if predicted is None or actual is None else predicted / actual - 1


@dataclass(frozen=True)
class Errors:
    """Statistics of errors. ``by_machine``: the median of the machines' own medians, one vote each;
    ``machines_within_25``: those whose own is at most 25 %."""

    rows: int
    machines: int
    median: float  # of absolute values
    bias: float  # median with its sign
    within_20: float
    by_machine: float
    machines_within_25: int


class ErrorLine(NamedTuple):
    """The errors of a group of rows. ``by``: what the rows of the group have in common."""

    quantity: Quantity
    by: str
    group: str
    errors: Errors


def error_table(rows: Sequence[MeasuredRow], predictions: Predictions) -> list[ErrorLine]:
    """A line for all rows, for those of quality C, which count in no other line, and for every group of rows.

    Groups are in the order of their number of rows. Raises what ``load_model`` and ``load_hardware`` raise.
    """
    scored = [row for row in rows if row.quality in SCORED_QUALITIES]
    poor = [row for row in rows if row.quality not in SCORED_QUALITIES]
    lines = []
    for quantity in QUANTITIES:
        groups = [("all", "all", scored), *_groups(scored, quantity), ("quality", "C", poor)]
        lines_of_speed = [(by, name, errors_of(members, predictions, quantity)) for by, name, members in groups]
        lines += [ErrorLine(quantity, by, name, errors) for by, name, errors in lines_of_speed if errors]
    return lines


def _groups(rows: Sequence[MeasuredRow], quantity: Quantity) -> Iterable[tuple[str, str, list[MeasuredRow]]]:
    """Yield a property of rows, its value, and the rows that have it."""
    for by, name_of in GROUPS.items():
        members: dict[str, list[MeasuredRow]] = {}
        for row in rows:
            if measured(row).of(quantity) is not None:
                members.setdefault(name_of(row), []).append(row)
        yield from ((by, name, members[name]) for name in sorted(members, key=lambda name: (-len(members[name]), name)))


def errors_of(rows: Iterable[MeasuredRow], predictions: Predictions, quantity: Quantity) -> Errors | None:
    """Statistics of the rows that have this speed, measured and predicted; None if there are none."""
    by_machine: dict[str, list[float]] = {}
    for row in rows:
        error = error_of(row, predictions, quantity)
        if error is not None:
            by_machine.setdefault(row.machine, []).append(error)
    errors = [error for own in by_machine.values() for error in own]
    if not errors:
        return None
    sizes = [abs(error) for error in errors]
    of_machines = [median(map(abs, own)) for own in by_machine.values()]
    return Errors(
        rows=len(errors), machines=len(by_machine), median=median(sizes), bias=median(errors),
        within_20=sum(size <= 0.20 for size in sizes) / len(sizes),
        by_machine=median(of_machines), machines_within_25=sum(size <= 0.25 for size in of_machines),
    )


@cache
def regime_of_row(row: MeasuredRow) -> Regime:
    """The regime of a measured row. Raises what ``load_model``, ``load_hardware`` and ``load_fitted`` raise."""
    return regime_of(shape_of(row), machine_of(row.machine), load_fitted(row.engine), split_of(row))


def family_of(row: MeasuredRow) -> str:
    """The model's name up to its size, two words at most: ``deepseek-v2`` of ``deepseek-v2-lite``."""
    words = Path(row.model).stem.split("-") if "/" in row.model else row.model.split("-")
    size = next((place for place, word in enumerate(words) if _SIZE.fullmatch(word)), len(words))
    return "-".join(words[: min(max(size, 1), 2)])


GROUPS: Mapping[str, Callable[[MeasuredRow], str]] = {
    "regime": regime_of_row,
    "model family": family_of,
    "format": lambda row: row.weights or "as published",
    "engine": lambda row: row.engine,
}


def regime_errors(rows: Sequence[MeasuredRow], predictions: Predictions) -> Iterator[RegimeAccuracy]:
    """Yield the errors of every regime, of all engines and of each; medians to three digits."""
    scored = [row for row in rows if row.quality in SCORED_QUALITIES]
    for regime in REGIMES:
        members = [row for row in scored if regime_of_row(row) == regime]
        for engine in ("", *sorted({load_fitted(row.engine).scored_as for row in members})):
            own = [row for row in members if engine in ("", load_fitted(row.engine).scored_as)]
            if errors := errors_of(own, predictions, "decode"):
                yield RegimeAccuracy(
                    regime, engine, round(errors.by_machine, 3), errors.machines_within_25, errors.machines, errors.rows
                )


def read_predictions(path: str | Path = HELD_OUT) -> dict[str, Speeds]:
    """Predicted speeds by the rows' ids; by default those of numbers fitted without the row's machine.

    Raises RowsError.
    """
    lines = read_csv(_PredictedRow, path, "a CSV file of predicted speeds", RowsError)
    return {line.id: Speeds(line.decode_tokens_per_s, line.prompt_tokens_per_s) for line in lines}


class _PredictedRow(NamedTuple):
    id: str
    decode_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
