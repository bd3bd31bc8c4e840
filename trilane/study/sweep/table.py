"""The table of a sweep: one row a point, in the order of points; columns, types and bytes depend on the grid alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import pyarrow as pa

from trilane.common.errors import TrilaneError
from trilane.common.json_text import parse_json
from trilane.common.parquet_files import read_parquet
from trilane.common.schema import from_dict
from trilane.study.sweep.axes import SCENARIO_KEYS, SweepError
from trilane.study.sweep.columns import COLUMNS, NUMBER, TEXT, TRUTH, WHOLE, cell, check_values
from trilane.study.sweep.grid import MOST_COMBINATIONS, Grid

Row: TypeAlias = Mapping[str, Any]

_MARK = b"trilane sweep"  # in the file's metadata: the names of its axes


def own_axes(grid: Grid) -> list[str]:
    """The axes that have a column of their own: those that are no key of a scenario."""
    return [name for name in grid.names if name not in SCENARIO_KEYS]


def table_of(grid: Grid, axes: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> pa.Table:
    """Rows of points and, next to each, the point's values on the axes."""
    schema = _schema(grid)
    values = [{**at, **row} for at, row in zip(axes, rows, strict=True)]
    arrays = [pa.array([cell(f.type, each.get(f.name)) for each in values], f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _schema(grid: Grid) -> pa.Schema:
    """Columns and their types, which depend on the grid alone."""
    axes = [(name, _type_of(value for each in grid.axes for value in each.get(name, ()))) for name in own_axes(grid)]
    marked = {_MARK: json.dumps(grid.names).encode()}
    return pa.schema([("point", TEXT), *axes, *COLUMNS.items()], metadata=marked)


def _type_of(values: Iterable[Any]) -> pa.DataType:
    """The narrowest type of all values of an axis."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int}:
        return WHOLE
    if kinds <= {int, float}:
        return NUMBER
    return TRUTH if kinds == {bool} else TEXT


# --- files ------------------------------------------------------------------------------------------------------------


def read_table(path: str | Path) -> pa.Table:
    """A table that a sweep has written. Raises SweepError if the file is none."""
    try:
        table = read_parquet(path, 2 * MOST_COMBINATIONS, SweepError)  # with the clairvoyant runs
    except FileNotFoundError:
        raise SweepError(f"{path}: there is no such file; make one: trilane sweep FILE.yaml -o {path}") from None
    except OSError as error:
        raise SweepError(f"{path}: {error.strerror or error}") from None
    if _MARK not in (table.schema.metadata or {}):
        raise _no_table(path, "this is some other table")
    if missing := [name for name in ("point", *COLUMNS) if name not in table.column_names]:
        raise _no_table(path, f"of another version of Trilane: it lacks {', '.join(missing)}")
    try:
        _check_columns(table)
        check_values(table)
    except TrilaneError as error:
        raise _no_table(path, f"no sweep has written this: {error}") from None
    return table


def _check_columns(table: pa.Table) -> None:
    """Raises SweepError for the first of names and types that are not those of its axes."""
    try:
        varied = from_dict(tuple[str, ...], parse_json(table.schema.metadata[_MARK], "axes"), "axes")
    except TrilaneError:
        raise SweepError("its metadata name no axes") from None
    axes = list(dict.fromkeys(name for name in varied if name not in SCENARIO_KEYS))
    if table.column_names != ["point", *axes, *COLUMNS]:
        raise SweepError("its columns are not those of its axes")
    for field in table.schema:
        if field.type not in ((WHOLE, NUMBER, TEXT, TRUTH) if field.name in axes else (COLUMNS.get(field.name, TEXT),)):
            raise SweepError(f"{field.name} is of another type")


def _no_table(path: str | Path, what: str) -> SweepError:
    return SweepError(f"{path}: expected the results of a sweep (trilane sweep FILE.yaml -o {path}), {what}")


def frame_of(table: pa.Table) -> pd.DataFrame:
    """The table for pandas; ``frame.attrs["axes"]`` names the axes that were varied."""
    frame: pd.DataFrame = table.to_pandas()
    frame.attrs["axes"] = json.loads(table.schema.metadata[_MARK])
    return frame


def read_results(path: str | Path) -> pd.DataFrame:
    """The results of a sweep, one row a point. Raises SweepError if the file holds anything else."""
    return frame_of(read_table(path))
