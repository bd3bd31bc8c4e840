"""A file of contributed speeds, checked: ``python -m tools.check_contribution FILE.csv [--add SOURCE]``.

Ranges are those of the schema; a row is refused that is bundled already, that is far from its prediction, or whose
machine is slower than its parts. ``--add`` appends the others to the bundled rows with their source.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trilane.common.csv_files import read_lines, write_csv
from trilane.common.errors import TrilaneError
from trilane.engines.accuracy.contribution import RowCheck, check_rows
from trilane.engines.accuracy.measured_rows import BUNDLED, MeasuredRow, RowsError, read_rows
from trilane.output.pages.share import remark_text


def added(checks: Sequence[RowCheck], source: str, bundled: Path) -> list[MeasuredRow]:
    """Append the rows that are well to a file, with the next numbers as ids, and return them."""
    lines = read_lines(bundled, "the bundled rows", RowsError)
    with bundled.open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file))
    last = max(int(line["id"]) for line in lines if line["id"].isdigit())
    new = [replace(check.row, id=str(last + place), source=source) for place, check in enumerate(_well(checks), 1)]
    known = [[line[name] for name in columns] for line in lines]
    write_csv([columns, *known, *(_cells(row, columns) for row in new)], bundled)
    return new


def _well(checks: Sequence[RowCheck]) -> list[RowCheck]:
    return [check for check in checks if check.well]


def _cells(row: MeasuredRow, columns: Sequence[str]) -> list[object]:
    values = [getattr(row, name, "") for name in columns]
    return ["" if value is None or value is False else "yes" if value is True else value for value in values]


def main(words: Sequence[str]) -> int:
    """Print a line for each row; 1 if one of them is not well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--add", metavar="SOURCE", help="append rows that are well to the bundled ones")
    asked = parser.parse_args(words)
    try:
        checks = check_rows(read_rows(asked.file))
    except (TrilaneError, OSError) as fault:
        parser.error(str(fault))
    for check in checks:
        error = "-" if check.error is None else f"{check.error:+.1%}"
        row = check.row
        print(f"{row.id}: {row.shape_name} on {row.machine}: {error}, {remark_text(check)}")
    if asked.add:
        print(f"added {len(added(checks, asked.add, BUNDLED))} rows to {BUNDLED}")
    return 0 if len(_well(checks)) == len(checks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
