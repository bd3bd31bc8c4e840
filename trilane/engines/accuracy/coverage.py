"""Coverage of the band that is printed with a speed: the measured rows inside the band that other machines give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sim.costs.engine import load_fitted
from trilane.engines.accuracy.errors import (
    Predictions,
    RegimeAccuracy,
    error_of,
    error_to_expect,
    factor,
    kept_errors,
    regime_errors,
    regime_of_row,
)
from trilane.engines.accuracy.measured_rows import MeasuredRow, machine_of, shape_of


def inside_of_others(rows: Sequence[MeasuredRow], predictions: Predictions) -> dict[str, bool]:
    """True for rows, by their ids, whose decode speed is inside the band of the rows of all other machines."""
    inside: dict[str, bool] = {}
    for machine in {row.machine: None for row in rows}:
        known = tuple(regime_errors([row for row in rows if row.machine != machine], predictions))
        if known:
            inside |= _inside([row for row in rows if row.machine == machine], predictions, known)
    return inside


def inside_of_kept(rows: Sequence[MeasuredRow], predictions: Predictions) -> dict[str, bool]:
    """True for rows, by their ids, whose decode speed is inside the band that is printed."""
    return _inside(rows, predictions, kept_errors())


def _inside(
    rows: Iterable[MeasuredRow], predictions: Predictions, known: Sequence[RegimeAccuracy]
) -> dict[str, bool]:
    errors = {row: error for row in rows if (error := error_of(row, predictions, "decode")) is not None}
    return {row.id: factor(error) <= 1 + _band(row, known) for row, error in errors.items()}


def _band(row: MeasuredRow, known: Iterable[RegimeAccuracy]) -> float:
    regime, engine = regime_of_row(row), load_fitted(row.engine)
    return error_to_expect(shape_of(row), machine_of(row.machine), regime, engine, known).band
