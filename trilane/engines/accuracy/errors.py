"""Errors of predicted speeds against measured ones: of all rows, and by regime, architecture, format and engine.

Regimes are kinds of machine and split, in each of which other parts of a cost model decide. The errors that each had on
the bundled rows are kept in ``regime_errors.csv`` for answers of ``trilane fit``. Every machine has one vote there:
rigs with many rows would weigh most otherwise. The band of an answer is the one that holds four fifths of such speeds.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
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
FEWEST_MACHINES = 5  # of fewer, a band says little
IN_BAND = 0.8  # share of speeds
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
EVERYTHING: _Group = ("", "", "", "")


class RegimeAccuracy(NamedTuple):
    """Errors of decode speeds that were predicted without the row's machine.

    ``regime``, ``architecture`` of the models, as GGUF files name it, ``engine``, the program, of whichever builds, and
    ``gpu``, its title: empty for all of them. ``median``: of the machines' own medians; ``bias``: the same with its
    sign, above 0 where predictions are too fast; ``band``: as in ``Errors``.
    """

    regime: Regime | Literal[""]
    architecture: str
    engine: str
    gpu: str
    median: float
    bias: float
    band: float
    machines: int
    rows: int

    @property
    def alone(self) -> bool:
        """True for speeds that are too few by themselves: fewer than three, or those of one machine."""
        return self.rows < _FEWEST_ROWS or self.machines == 1


class ErrorToExpect(NamedTuple):
    """Errors of speeds that resemble a prediction. ``all_machines``: of every measured speed. ``like_machines``: of
    such machines, with all models; None: never measured. ``like_models``: of the model's architecture, on such machines
    if several were measured there, else on all; None: never measured. ``like_card``: of its architecture with the
    machine's own GPU, three speeds or more."""

    all_machines: RegimeAccuracy
    like_machines: RegimeAccuracy | None
    like_models: RegimeAccuracy | None
    like_card: RegimeAccuracy | None

    @property
    def few(self) -> bool:
        """True if too few such machines were measured for a band of their own."""
        return self.like_machines is None or self.like_machines.machines < FEWEST_MACHINES

    @property
    def band(self) -> float:
        """Speeds are between predicted / (1 + band) and predicted * (1 + band), four fifths of them: the band of such
        machines; if they are few that of all, or if this architecture was measured on this GPU its own there, if wider.
        """
        wider = (self.like_machines, self.like_card, self.all_machines if self.few else None)
        return max(known.band for known in wider if known)

    def within(self, tokens_per_s: float) -> tuple[float, float]:
        """Lowest and highest of the speeds around a predicted one, between which four fifths are."""
        return tokens_per_s / (1 + self.band), tokens_per_s * (1 + self.band)


def error_to_expect(
    shape: ModelShape, hardware: Hardware, regime: Regime, engine: FittedEngine,
    known: Iterable[RegimeAccuracy] | None = None,
) -> ErrorToExpect:
    """The errors that an engine had in a regime, or all engines where fewer than five machines ran it; and those of
    the model's architecture with all engines. ``known``: in place of those that are kept."""
    errors = {error[:4]: error for error in (kept_errors() if known is None else known)}
    of_engine = errors.get((regime, "", engine.scored_as, ""))
    enough = of_engine and of_engine.machines >= FEWEST_MACHINES
    architecture = architecture_of(shape) or _UNKNOWN
    here, anywhere = (errors.get((where, architecture, "", "")) for where in (regime, ""))
    card = None if hardware.cpu_only else errors.get(("", architecture, "", hardware.gpu.name))
    return ErrorToExpect(
        errors[EVERYTHING],
        of_engine if enough else errors.get((regime, "", "", "")),
        here if here and not here.alone else anywhere,
        card if card and card.rows >= _FEWEST_ROWS else None,
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
    ``bias_by_machine``. ``p90``: 90 % of the rows' errors are smaller. ``band``: 80 % of speeds, one vote a machine,
    are predicted within it: between measured / (1 + band) and measured * (1 + band)."""

    rows: int
    machines: int
    median: float  # of absolute values
    bias: float  # median with its sign
    p90: float  # of absolute values
    by_machine: float
    bias_by_machine: float
    band: float
    inside: float | None = None  # share of rows inside the band that is printed with such speeds, where that is known


class ErrorLine(NamedTuple):
    """The errors of a group of rows. ``by``: what the rows of the group have in common."""

    quantity: Quantity
    by: str
    group: str
    errors: Errors


def error_table(
    rows: Sequence[MeasuredRow], predictions: Predictions, inside: Mapping[str, bool] | None = None
) -> list[ErrorLine]:
    """A line for all rows, for those of quality C, which count in no other line, and for every group of rows; rows at
    fault count in none.

    Groups are in the order of their number of rows. ``inside``: whether a row's decode speed is in its band, by ids.
    Raises what ``load_model`` and ``load_hardware`` raise.
    """
    scored = [row for row in rows if row.scored]
    poor = [row for row in rows if not row.scored and not row.fault]
    lines = []
    for quantity in QUANTITIES:
        groups = [("all", "all", scored), *_groups(scored, quantity), ("quality", "C", poor)]
        bands = inside if quantity == "decode" else None
        lines_of_speed = [(by, name, errors_of(members, predictions, quantity, bands)) for by, name, members in groups]
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


def errors_of(
    rows: Iterable[MeasuredRow], predictions: Predictions, quantity: Quantity,
    inside: Mapping[str, bool] | None = None,
) -> Errors | None:
    """Statistics of the rows that have this speed, measured and predicted, and not put in; None if there are none."""
    by_machine: dict[str, list[float]] = {}
    in_band: list[bool] = []
    for row in rows:
        error = error_of(row, predictions, quantity)
        if error is not None and not row.sets(quantity):
            by_machine.setdefault(row.machine, []).append(error)
            in_band += [inside[row.id]] if inside and row.id in inside else []
    errors = [error for own in by_machine.values() for error in own]
    if not errors:
        return None
    sizes = [abs(error) for error in errors]
    of_machines = [median(map(abs, own)) for own in by_machine.values()]
    return Errors(
        rows=len(errors), machines=len(by_machine), median=median(sizes), bias=median(errors),
        p90=quantile([(size, 1.0) for size in sizes], 0.9),
        by_machine=median(of_machines), bias_by_machine=median(map(median, by_machine.values())),
        band=quantile([(factor(error) - 1, 1 / len(own)) for own in by_machine.values() for error in own], IN_BAND),
        inside=sum(in_band) / len(in_band) if in_band else None,
    )


def quantile(values: Iterable[tuple[float, float]], share: float) -> float:
    """The least of some values, each with a weight, than which values of this share of the weight are not larger."""
    ordered = sorted(values)
    sums = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(sums, share * sums[-1] * (1 - 1e-9))][0]  # sums are not exact


def factor(error: float) -> float:
    """How many times too fast or too slow."""
    return max(1 + error, 1 / (1 + error))


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
    """Yield the errors of every regime, of all engines, of each, and of each architecture; then those of everything, of
    architectures in all regimes, and with each GPU. To three digits."""
    groups: dict[_Group, list[MeasuredRow]] = {}
    for row in rows:
        if row.scored:
            regime, architecture, gpu = regime_of_row(row), architecture_of_row(row), machine_of(row.machine).gpu.name
            engine = load_fitted(row.engine).scored_as
            keys: list[_Group] = [
                EVERYTHING, (regime, "", "", ""), (regime, "", engine, ""), (regime, architecture, "", ""),
                ("", architecture, "", ""), ("", architecture, "", gpu),
            ]
            for key in keys:
                groups.setdefault(key, []).append(row)
    for key in sorted(groups, key=lambda key: ((*REGIMES, "").index(key[0]), key[1:])):
        if errors := errors_of(groups[key], predictions, "decode"):
            off, bias, band = (round(one, 3) for one in (errors.by_machine, errors.bias_by_machine, errors.band))
            yield RegimeAccuracy(*key, off, bias, band, errors.machines, errors.rows)


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
