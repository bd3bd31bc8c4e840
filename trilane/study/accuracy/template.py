"""A CSV file for measured speeds of one's own: all columns, and one of the bundled rows as an example."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path
from typing import Any

from trilane.common.files import atomic_path
from trilane.study.accuracy.measured_rows import MeasuredRow, read_rows

EXAMPLE = "177"  # experts of some layers on the CPU, decode and prompt speed
COLUMNS = tuple(field.name for field in fields(MeasuredRow) if field.name != "left_out")


def write_template(path: str | Path) -> None:
    """Write the file. Raises OSError if that is not possible."""
    example = next(row for row in read_rows() if row.id == EXAMPLE)
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerow(["example", *(_cell(getattr(example, name)) for name in COLUMNS[1:])])


def _cell(value: Any) -> str:
    """A value as ``read_rows`` takes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
