"""Rows of speeds of one program, of which some set numbers of an engine and the others are predicted with it.

A file is a table: ``COLUMNS``, and any fields of a scenario as further columns, in YAML; ``source`` and ``note`` are
passed over. Fields that a row leaves empty are those of the file in its column ``scenario``, or the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sim.costs.engine import load_engine
from sim.runs.prepare import prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.simulate import play
from trilane.common.csv_files import read_csv, read_lines, write_csv
from trilane.common.files import atomic_path
from trilane.common.hints import Name, field_names
from trilane.common.names import unknown
from trilane.common.yaml_files import parse_yaml, yaml_text
from trilane.study.calibrate import (
    CalibrationError,
    SpeedQuantity,
    TimedPlay,
    UnreachedError,
    calibrated,
    log_error,
    order_of,
    value_in,
    with_numbers,
)
from trilane.study.kinds import ends_of

MOST_PUT_IN = 3
_WHAT = "a CSV file of speeds of one program"
_PASSED_OVER = ("source", "note")
_DIGITS = 4  # of a number that is written


@dataclass(frozen=True, kw_only=True)
class _Line:
    id: Name
    quantity: SpeedQuantity
    value: float
    put_in: bool = False
    scenario: str = ""


COLUMNS = field_names(_Line)


class SpeedRow(NamedTuple):
    """A speed, and whether it sets a number."""

    id: str
    play: TimedPlay
    put_in: bool


class PredictedRow(NamedTuple):
    """A speed, as measured and simulated: with the engine's own numbers (``before``), between the ends of its kind, and
    with those that were set."""

    row: SpeedRow
    before: float
    ends: tuple[float, float] | None
    simulated: float

    @property
    def error(self) -> float:
        """Simulated over measured, minus 1."""
        return self.simulated / self.row.play.value - 1


class CalibratedRows(NamedTuple):
    """Numbers of an engine that rows have set, and all rows with them."""

    engine: str
    numbers: Mapping[str, float]
    rows: tuple[PredictedRow, ...]

    @property
    def median_error(self) -> float | None:
        """Median of the absolute errors of rows that set nothing; None without any."""
        errors = [abs(each.error) for each in self.rows if not each.row.put_in]
        return median(errors) if errors else None

    @property
    def put_in(self) -> list[str]:
        """Ids of the rows that set the numbers."""
        return [each.row.id for each in self.rows if each.row.put_in]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = [
            {"id": each.row.id, "quantity": each.row.play.quantity, "put_in": each.row.put_in,
             "measured": each.row.play.value, "simulated": each.simulated, "before": each.before,
             "ends": each.ends and list(each.ends)}
            for each in self.rows
        ]
        return {"engine": self.engine, "numbers": dict(self.numbers), "rows": rows, "median_error": self.median_error}


# --- files ------------------------------------------------------------------------------------------------------------


def read_speed_rows(path: str | Path, engine: str) -> list[SpeedRow]:
    """Rows of a file, played with ``engine``. Raises CalibrationError, and ScenarioError for fields of a scenario."""
    lines = read_csv(_Line, path, _WHAT, CalibrationError)
    cells = read_lines(path, _WHAT, CalibrationError)
    for name in cells[0] if cells else ():
        if name not in (known := (*COLUMNS, *_PASSED_OVER, *field_names(Scenario))):
            raise CalibrationError(f"{path}: {unknown('column', name, known)}")
    rows = [_row(line, cell, Path(path), engine) for line, cell in zip(lines, cells, strict=True)]
    if (count := sum(row.put_in for row in rows)) not in range(1, MOST_PUT_IN + 1):
        raise CalibrationError(f"{path}: expected 1 to {MOST_PUT_IN} rows with put_in yes, got {count}")
    return rows


def _row(line: _Line, cells: Mapping[str, str], path: Path, engine: str) -> SpeedRow:
    where = f"{path.name}, row {line.id}"
    base = Scenario.from_yaml(path.parent / line.scenario).to_dict() if line.scenario else {}
    given = {name: parse_yaml(text, f"{where}: {name}", CalibrationError)
             for name, text in cells.items() if text and name not in (*COLUMNS, *_PASSED_OVER)}
    scenario = Scenario.from_dict({**base, **given, "engine": engine}, where)
    if line.value <= 0:
        raise CalibrationError(f"{where}: value: expected a number above 0, got {line.value:g}")
    return SpeedRow(line.id, TimedPlay(scenario, line.quantity, line.value), line.put_in)


_FIELDS = (
    "model", "trace", "hardware", "policy", "cached_share", "prompt_tokens", "generated_tokens", "sampled_steps",
)
_SETTING = ("deepseek-v2-lite", "synthetic:deepseek-v2-lite/1x64+16", "rtx3090-ddr4", "mixtral-offloading")
_EXAMPLE: Sequence[Sequence[object]] = (
    (*COLUMNS, *_FIELDS, "note"),
    ("half-cached", "tokens_per_s", 12, "yes", "", *_SETTING, 0.5, 64, 128, 16, "made up: 1 to 3 rows set a number"),
    ("quarter-cached", "tokens_per_s", 8.6, "no", "", *_SETTING, 0.25, 64, 128, 16, "made up; predicted"),
    ("first-token", "ttft_ms", 900, "no", "", *_SETTING, 0.5, 64, 128, 16, "any field of a scenario may be a column"),
)


def write_template(path: str | Path) -> None:
    """Write an example of such a file."""
    write_csv(_EXAMPLE, path)


def write_engine(calibration: CalibratedRows, path: str | Path, rows_file: str) -> None:
    """Write the engine as a file that scenarios name."""
    rows = ", ".join(calibration.put_in)
    software = {
        key.removeprefix("software."): {
            "value": value, "source": f"calibrated: {rows} of {Path(rows_file).name}", "confidence": "medium",
        }
        for key, value in calibration.numbers.items()
    }
    document = {
        "like": calibration.engine,
        "about": f"{calibration.engine} with numbers that {rows} of {Path(rows_file).name} set",
        "software": software,
        "spread": {key: {"quick": value, "slow": value} for key, value in calibration.numbers.items()},
    }
    with atomic_path(path) as aside:
        aside.write_text(yaml_text(document), encoding="utf-8")


# --- setting and predicting -------------------------------------------------------------------------------------------


def calibrate_rows(rows: Sequence[SpeedRow], engine: str) -> CalibratedRows:
    """Set as many numbers of ``engine`` as rows are put in, and predict all rows with them.

    Raises CalibrationError; for times that no values give, with what would have to change.
    """
    own = [row for row in rows if row.put_in]
    order_of(engine, len(own))
    try:
        found = calibrated([row.play for row in own])
    except UnreachedError as error:
        raise CalibrationError(f"{', '.join(row.id for row in own)}: {_advice(own, engine, error)}") from None
    numbers = {key: float(f"{value:.{_DIGITS}g}") for key, value in found.items()}
    return CalibratedRows(engine, numbers, tuple(_predicted(row, numbers) for row in rows))


def _predicted(row: SpeedRow, numbers: Mapping[str, float]) -> PredictedRow:
    prepared, ends = prepare(row.play.scenario), ends_of(row.play.scenario)

    def simulated(changed: Mapping[str, Any]) -> float:
        return value_in(play(with_numbers(prepared, changed)), row.play.quantity)

    both = sorted(simulated(end.engine_overrides) for end in ends or ())
    return PredictedRow(row, simulated({}), (both[0], both[-1]) if both else None, simulated(numbers))


# --- times that cannot be met -----------------------------------------------------------------------------------------

_ALONE = {"_share": 1.0, "_ns": 0.0, "_bytes": 1e-9}  # by the ending of a number: what the machine alone has
_OF_LANE = {
    "h2d": "copies: link.h2d_bytes_per_s, or what is cached (cached_share, the policy)",
    "cpu": "experts on the CPU: cpu.read_bytes_per_s, or what the policy leaves to it",
    "gpu": "the GPU's work: gpu.bandwidth_bytes_per_s, gpu.kernel_ns, or the weights (model)",
    "host": "the host: host.launch_ns, host.sync_ns",
}


def _advice(rows: Sequence[SpeedRow], engine: str, error: UnreachedError) -> str:
    """Return what to change: the machine or the policy, where these alone take longer than was measured; else numbers
    that were not set."""
    keys = load_engine(engine).spread
    alone = {key: next(value for end, value in _ALONE.items() if key.endswith(end)) for key in keys}
    for row in rows:
        run = play(with_numbers(prepare(row.play.scenario), alone))
        simulated = value_in(run, row.play.quantity)
        if log_error(row.play.quantity, simulated, row.play.value) > 0:
            return (
                f"{row.play.value:g} {row.play.quantity} cannot be met: the machine alone, without anything of the "
                f"program, comes to {simulated:.4g}; what would have to change is {_OF_LANE[_busiest(run)]}"
            )
    others = ", ".join(key for key in keys if key not in error.nearest)
    return f"{error}; with the machine alone they could be met: change {others} (--set engine_overrides) and try again"


def _busiest(run: Run) -> str:
    """The lane that works longest while the answer is generated."""
    return max(_OF_LANE, key=lambda lane: run.metrics.run_busy_share.get(lane) or 0.0)
