"""Measured rows with every prediction of them: held out, as shipped, and by the closed forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trilane.common.errors import TrilaneError
from trilane.common.quoting import quoted
from trilane.engines.accuracy.closed_forms import data_sheet, llmfit
from trilane.engines.accuracy.errors import (
    QUANTITIES,
    SCORED_QUALITIES,
    Errors,
    Predictions,
    Quantity,
    Speeds,
    error_of,
    error_table,
    measured,
    read_predictions,
)
from trilane.engines.accuracy.measured_rows import MeasuredRow, RowsError, read_rows
from trilane.engines.accuracy.prediction import predict
from trilane.engines.accuracy.regimes import regime_of_row

HELD_OUT, SHIPPED, DATA_SHEET, LLMFIT = "held out", "shipped", "data sheet", "llmfit"


@dataclass(frozen=True)
class Scores:
    """Rows that can be asked, and predictions of them by their names, of which the first count."""

    rows: Sequence[MeasuredRow]
    predictions: Mapping[str, Predictions]
    left_out: Mapping[str, str]  # why other rows were not asked, by their ids

    @property
    def first(self) -> Predictions:
        """The predictions that count."""
        return next(iter(self.predictions.values()))

    @property
    def counted(self) -> list[MeasuredRow]:
        """Rows that are more than a sanity check."""
        return [row for row in self.rows if row.quality in SCORED_QUALITIES]

    def table(self) -> dict[tuple[Quantity, str, str], dict[str, Errors]]:
        """Errors by the name of the predictions, for each line of the first ones' table."""
        tables = {
            name: {(line.quantity, line.by, line.group): line.errors for line in error_table(self.rows, predictions)}
            for name, predictions in self.predictions.items()
        }
        keys = tables[next(iter(tables))]
        return {key: {name: table[key] for name, table in tables.items() if key in table} for key in keys}

    def furthest(self, quantity: Quantity, beyond: float) -> list[tuple[MeasuredRow, float]]:
        """Rows with larger errors than ``beyond``, as factors of too fast or too slow, the worst first."""
        errors = [(row, error_of(row, self.first, quantity)) for row in self.rows]
        far = [(row, error) for row, error in errors if error is not None and factor(error) > 1 + beyond]
        return sorted(far, key=lambda each: -factor(each[1]))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: errors by group, every row's speeds, and what was left out."""
        lines = [
            {"speed": quantity, "by": by, "group": group, "errors": {name: vars(e) for name, e in errors.items()}}
            for (quantity, by, group), errors in self.table().items()
        ]
        return {"errors": lines, "rows": [self.facts(row) for row in self.rows], "left_out": dict(self.left_out)}

    def facts(self, row: MeasuredRow) -> dict[str, Any]:
        """A row's setting and speeds."""
        speeds = {"measured": measured(row)} | {
            name: each.get(row.id, Speeds()) for name, each in self.predictions.items()
        }
        return {
            "id": row.id, "model": row.shape_name, "machine": row.machine, "engine": row.engine,
            "regime": regime_of_row(row), "quality": row.quality,
            **{quantity: {name: each.of(quantity) for name, each in speeds.items()} for quantity in QUANTITIES},
        }


def factor(error: float) -> float:
    """How many times too fast or too slow."""
    return max(1 + error, 1 / (1 + error))


def bundled_scores() -> Scores:
    """Of the rows that come with the program. Raises RowsError."""
    rows = read_rows()
    asked = [row for row in rows if not row.left_out]
    reasons = {row.id: row.left_out for row in rows if row.left_out}
    return Scores(asked, {HELD_OUT: read_predictions(), **_predictions(asked)}, reasons)


def scores_of(path: str) -> Scores:
    """Of a user's rows, with the engines as shipped. Rows with names that are unknown are left out.

    Raises RowsError for a file that cannot be read, and where no row can be asked.
    """
    rows = read_rows(path)
    reasons = {row.id: reason for row in rows if (reason := row.left_out or _refusal(row))}
    asked = [row for row in rows if row.id not in reasons]
    _check_ids(rows, path)
    if not asked:
        example = next(iter(reasons.values()), "it has none")
        raise RowsError(f"{path}: expected rows that can be asked; {example}")
    return Scores(asked, _predictions(asked), reasons)


def row_of(rows: Sequence[MeasuredRow], row_id: str) -> MeasuredRow:
    """The row with this id. Raises RowsError."""
    for row in rows:
        if row.id == row_id:
            return row
    some = ", ".join(row.id for row in rows[:10])
    raise RowsError(f"there is no row {quoted(row_id)}; ids are {some} ...; `trilane accuracy --json -` lists them all")


def _check_ids(rows: Sequence[MeasuredRow], path: str) -> None:
    """Raises RowsError for an id that is there twice."""
    for row_id, count in Counter(row.id for row in rows).items():
        if count > 1:
            raise RowsError(f"{path}: expected an id of its own for every row, {quoted(row_id)} is there twice")


def _refusal(row: MeasuredRow) -> str:
    """Why a row cannot be asked, or nothing."""
    try:
        _shipped(row)
        regime_of_row(row)
    except TrilaneError as error:
        return str(error)
    return ""


def _predictions(rows: Sequence[MeasuredRow]) -> dict[str, Predictions]:
    forms: Mapping[str, Callable[[MeasuredRow], Speeds]] = {SHIPPED: _shipped, DATA_SHEET: data_sheet, LLMFIT: llmfit}
    return {name: {row.id: form(row) for row in rows} for name, form in forms.items()}


def _shipped(row: MeasuredRow) -> Speeds:
    found = predict(row)
    return Speeds(found.decode_tokens_per_s, found.prompt_tokens_per_s)
