"""The error that each regime had on the bundled rows, kept in ``regime_errors.csv`` for answers of ``trilane fit``."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from trilane.common.files import atomic_path
from trilane.study.accuracy.errors import Errors, Predictions, error_table
from trilane.study.accuracy.measured_rows import BUNDLED, MeasuredRow
from trilane.study.accuracy.regimes import Regime

REGIME_ERRORS = BUNDLED.with_name("regime_errors.csv")
FEWEST_ROWS = 3  # of fewer, a median says nothing


class RegimeAccuracy(NamedTuple):
    """Errors of decode speeds that were predicted without the row's machine; ``within_25``: a share."""

    median: float
    within_25: float
    rows: int
    machines: int


def regime_error(regime: Regime) -> RegimeAccuracy | None:
    """The error that a regime had; None where fewer than three rows are of it."""
    found = kept_errors().get(regime)
    return found if found and found.rows >= FEWEST_ROWS else None


@cache
def kept_errors() -> Mapping[str, RegimeAccuracy]:
    """Of every regime, from the file: to find the regimes of all rows takes too long for an answer."""
    with REGIME_ERRORS.open(encoding="utf-8", newline="") as file:
        return {line["regime"]: _read(line) for line in csv.DictReader(file)}


def _read(line: Mapping[str, str]) -> RegimeAccuracy:
    return RegimeAccuracy(float(line["median"]), float(line["within_25"]), int(line["rows"]), int(line["machines"]))


def regime_errors(rows: list[MeasuredRow], predictions: Predictions) -> dict[str, RegimeAccuracy]:
    """Of every regime, from the rows; shares to three digits."""
    lines = [line for line in error_table(rows, predictions) if (line.quantity, line.by) == ("decode", "regime")]
    return {line.group: _rounded(line.errors) for line in lines}


def _rounded(errors: Errors) -> RegimeAccuracy:
    return RegimeAccuracy(round(errors.median, 3), round(errors.within_25, 3), errors.rows, errors.machines)


def write_regime_errors(found: Mapping[str, RegimeAccuracy]) -> None:
    """Renew the file."""
    with atomic_path(REGIME_ERRORS) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("regime", *RegimeAccuracy._fields))
        writer.writerows((regime, *error) for regime, error in found.items())
