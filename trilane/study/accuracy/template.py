"""A CSV file for measured speeds of one's own: all columns, and one of the bundled rows as an example."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from trilane.common.csv_files import write_csv
from trilane.study.accuracy.measured_rows import MeasuredRow, read_rows

EXAMPLE = "177"  # experts of some layers on the CPU, decode and prompt speed
COLUMNS = tuple(field.name for field in fields(MeasuredRow) if field.name != "left_out")


def write_template(path: str | Path) -> None:
    """Write the file. Raises OSError if that is not possible."""
    example = next(row for row in read_rows() if row.id == EXAMPLE)
    cells = ("example", *(_cell(getattr(example, name)) for name in COLUMNS[1:]))
    write_csv([COLUMNS, cells], path)


def _cell(value: object) -> object:
    """A value as ``read_rows`` takes it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
