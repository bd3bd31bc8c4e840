"""Errors of predicted speeds against measured ones: of all rows, and by regime, architecture, format and engine.

Regimes are kinds of machine and split, in each of which other parts of a cost model decide. The errors that each had on
the bundled rows are kept in ``regime_errors.csv`` for answers of ``trilane fit``. Every machine has one vote there:
rigs with many rows would weigh most otherwise.
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
from traces.models.catalogue import architecture_of
from traces.models.shape import ModelShape
from trilane.common.csv_files import read_csv
from trilane.engines.accuracy.measured_rows import BUNDLED, MeasuredRow, RowsError, machine_of, shape_of, split_of
from trilane.engines.split_speed import StaticSplit

Regime = Literal["all GPU", "mixed", "experts on CPU", "server", "CPU only", "laptop", "Vulkan", "unified"]
REGIMES: tuple[Regime, ...] = get_args(Regime)
SERVER_BYTES_PER_S = 150e9  # theory of the DRAM: six channels of DDR4 have it, two of DDR5 do not
_MOBILE = re.compile(r"laptop|Ryzen AI|\d(U|H|HS|HX|HK)\b")
REGIME_ERRORS = Path(__file__).with_name("regime_errors.csv")
_UNKNOWN = "others"  # architectures
FEWEST_MACHINES = 3  # of fewer, a median says nothing
_FEWEST_ROWS = 3  # of one GPU


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


_Group = tuple[Regime | Literal[""], str, str, str]  # regime, architecture, engine, GPU: as in ``RegimeAccuracy``


class RegimeAccuracy(NamedTuple):
    """Errors of decode speeds that were predicted without the row's machine.

    ``regime``, ``architecture`` of the models, as GGUF files name it, ``engine``, the program, of whichever builds, and
    ``gpu``, its title: empty for all of them. ``median``: of the machines' own medians; ``bias``: the same with its
    sign, above 0 where predictions are too fast; ``within_25``: machines whose own median is at most 25 %.
    """

    regime: Regime | Literal[""]
    architecture: str
    engine: str
    gpu: str
    median: float
    bias: float
    within_25: int
    machines: int
    rows: int


class ErrorToExpect(NamedTuple):
    """Errors of speeds that resemble a prediction. ``like_machines``: of such machines, with all models; None: of fewer
    than three. ``like_models``: of the model's architecture, on such machines if any was measured there, else on all;
    None: never measured. ``like_card``: of its architecture with the machine's own GPU."""

    like_machines: RegimeAccuracy | None
    like_models: RegimeAccuracy | None
    like_card: RegimeAccuracy | None

    @property
    def best_known(self) -> RegimeAccuracy | None:
        """The errors of what resembles the prediction most: of this architecture on this GPU, if three speeds or more
        were measured, on such machines, if three machines were, else of such machines."""
        card, models = self.like_card, self.like_models
        if card and card.rows >= _FEWEST_ROWS:
            return card
        return models if models and models.regime and models.machines >= FEWEST_MACHINES else self.like_machines


def error_to_expect(shape: ModelShape, hardware: Hardware, regime: Regime, engine: FittedEngine) -> ErrorToExpect:
    """The errors that an engine had in a regime, or all engines where fewer than three machines ran it; and those of
    the model's architecture with all engines."""
    known = {error[:4]: error for error in kept_errors()}
    of_regime = (known.get((regime, "", name, "")) for name in (engine.scored_as, ""))
    architecture = architecture_of(shape) or _UNKNOWN
    return ErrorToExpect(
        next((error for error in of_regime if error and error.machines >= FEWEST_MACHINES), None),
        known.get((regime, architecture, "", "")) or known.get(("", architecture, "", "")),
        None if hardware.cpu_only else known.get(("", architecture, "", hardware.gpu.name)),
    )


@cache
def kept_errors() -> tuple[RegimeAccuracy, ...]:
    """All of the file: to find the regimes of all rows takes too long for an answer."""
    return tuple(read_csv(RegimeAccuracy, REGIME_ERRORS, "the errors of regimes", RowsError))


HELD_OUT = BUNDLED.with_name("held_out.csv")
Quantity = Literal["decode", "prompts"]
QUANTITIES: tuple[Quantity, ...] = ("decode", "prompts")


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
    """Statistics of errors. ``by_machine``: the median of the machines' own medians, one vote each, and with its sign
    ``bias_by_machine``; ``machines_within_25``: those whose own is at most 25 %."""

    rows: int
    machines: int
    median: float  # of absolute values
    bias: float  # median with its sign
    within_20: float
    by_machine: float
    bias_by_machine: float
    machines_within_25: int


class ErrorLine(NamedTuple):
    """The errors of a group of rows. ``by``: what the rows of the group have in common."""

    quantity: Quantity
    by: str
    group: str
    errors: Errors


def error_table(rows: Sequence[MeasuredRow], predictions: Predictions) -> list[ErrorLine]:
    """A line for all rows, for those of quality C, which count in no other line, and for every group of rows; rows at
    fault count in none.

    Groups are in the order of their number of rows. Raises what ``load_model`` and ``load_hardware`` raise.
    """
    scored = [row for row in rows if row.scored]
    poor = [row for row in rows if not row.scored and not row.fault]
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
        by_machine=median(of_machines), bias_by_machine=median(map(median, by_machine.values())),
        machines_within_25=sum(size <= 0.25 for size in of_machines),
    )


@cache
def regime_of_row(row: MeasuredRow) -> Regime:
    """The regime of a measured row. Raises what ``load_model``, ``load_hardware`` and ``load_fitted`` raise."""
    return regime_of(shape_of(row), machine_of(row.machine), load_fitted(row.engine), split_of(row))


def architecture_of_row(row: MeasuredRow) -> str:
    """The architecture of a row's model, as GGUF files name it. Raises what ``load_model`` raises."""
    return architecture_of(shape_of(row)) or _UNKNOWN


GROUPS: Mapping[str, Callable[[MeasuredRow], str]] = {
    "regime": regime_of_row,
    "architecture": architecture_of_row,
    "format": lambda row: row.weights or "as published",
    "engine": lambda row: row.engine,
}


def regime_errors(rows: Sequence[MeasuredRow], predictions: Predictions) -> Iterator[RegimeAccuracy]:
    """Yield the errors of every regime, of all engines, of each, and of each architecture; then those of architectures
    in all regimes, and with each GPU. To three digits."""
    groups: dict[_Group, list[MeasuredRow]] = {}
    for row in rows:
        if row.scored:
            regime, architecture, gpu = regime_of_row(row), architecture_of_row(row), machine_of(row.machine).gpu.name
            engine = load_fitted(row.engine).scored_as
            keys: list[_Group] = [
                (regime, "", "", ""), (regime, "", engine, ""), (regime, architecture, "", ""),
                ("", architecture, "", ""), ("", architecture, "", gpu),
            ]
            for key in keys:
                groups.setdefault(key, []).append(row)
    for key in sorted(groups, key=lambda key: ((*REGIMES, "").index(key[0]), key[1:])):
        if errors := errors_of(groups[key], predictions, "decode"):
            medians = round(errors.by_machine, 3), round(errors.bias_by_machine, 3)
            yield RegimeAccuracy(*key, *medians, errors.machines_within_25, errors.machines, errors.rows)


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
