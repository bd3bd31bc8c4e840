"""The table of a sweep: one row a point, in the order of points; columns, types and bytes depend on the grid alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, get_type_hints

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from sim.runs.metrics import METRIC_TYPES
from sim.runs.routing_error import TOTALS
from sim.runs.scenario import Scenario
from trilane.common.files import atomic_path
from trilane.study.sweep.axes import SCENARIO_KEYS, SweepError
from trilane.study.sweep.grid import Grid, canonical

Row: TypeAlias = Mapping[str, Any]

_MARK = b"trilane sweep"  # in the file's metadata: the names of its axes
_WHOLE, _NUMBER, _TEXT = pa.int64(), pa.float64(), pa.string()
_ARROW = {int: _WHOLE, int | None: _WHOLE, float: _NUMBER, float | None: _NUMBER}
_MEMORY = ("cache_bytes", "cache_slots", "staging_bytes")
_BOUNDS = ("lower_bound_ttft_ms", "lower_bound_tpot_ms", "null_model_tpot_ms")


def _columns_of(kind: type) -> dict[str, pa.DataType]:
    """Numbers as they are, all else (names, lists, mappings as JSON) as text."""
    hints = get_type_hints(kind)
    return {f.name: _ARROW.get(hints[f.name], _TEXT) for f in fields(kind)}


COLUMNS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        **_columns_of(Scenario),
        "draw": _WHOLE,
        "labels": _TEXT,
        **{name: _ARROW[kind] for name, kind in METRIC_TYPES.items()},
        **dict.fromkeys(TOTALS, _NUMBER),
        "energy_j_per_token": _NUMBER,
        **dict.fromkeys(_BOUNDS, _NUMBER),
        **dict.fromkeys(_MEMORY, _WHOLE),
        "cache_share": _NUMBER,
        "trilane_version": _TEXT,
        "trace_checksum": _TEXT,
        "error": _TEXT,
    }
)  # of every table, after the point's key and its axes


def own_axes(grid: Grid) -> list[str]:
    """The axes that have a column of their own: those that are no key of a scenario."""
    return [name for name in grid.names if name not in SCENARIO_KEYS]


def cell(value: Any) -> Any:
    """A value as a table holds it: lists and mappings as JSON text."""
    return canonical(value) if isinstance(value, list | tuple | Mapping) else value


def table_of(grid: Grid, axes: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> pa.Table:
    """Rows of points and, next to each, the point's values on the axes."""
    schema = _schema(grid)
    values = {name: [cell(at.get(name)) for at in axes] for name in own_axes(grid)}
    columns = ((f, values.get(f.name) or [row[f.name] for row in rows]) for f in schema)
    arrays = [pa.array(_as(f.type, column), f.type) for f, column in columns]
    return pa.Table.from_arrays(arrays, schema=schema)


def _schema(grid: Grid) -> pa.Schema:
    """Columns and their types, which depend on the grid alone."""
    axes = [(name, _type_of(value for each in grid.axes for value in each.get(name, ()))) for name in own_axes(grid)]
    marked = {_MARK: json.dumps(grid.names).encode()}
    return pa.schema([("point", _TEXT), *axes, *COLUMNS.items()], metadata=marked)


def _type_of(values: Iterable[Any]) -> pa.DataType:
    """The narrowest type of all values of an axis."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int}:
        return _WHOLE
    if kinds <= {int, float}:
        return _NUMBER
    return pa.bool_() if kinds == {bool} else _TEXT


def _as(kind: pa.DataType, values: Sequence[Any]) -> list[Any]:
    """Values of a column of text are text."""
    if kind != _TEXT:
        return list(values)
    return [value if value is None or isinstance(value, str) else canonical(value) for value in values]


# --- files ------------------------------------------------------------------------------------------------------------


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table as Parquet, aside first and then renamed; the same bytes for the same table."""
    with atomic_path(path) as aside:
        pq.write_table(table, aside, compression="zstd", row_group_size=1 << 16, version="2.6")


def read_table(path: str | Path) -> pa.Table:
    """A table that a sweep has written. Raises SweepError if the file is none."""
    try:
        with open(path, "rb") as file:
            table = pq.read_table(pa.BufferReader(file.read()))
    except FileNotFoundError:
        raise SweepError(f"{path}: there is no such file; make one: trilane sweep FILE.yaml -o {path}") from None
    except OSError as error:
        raise SweepError(f"{path}: {error.strerror or error}") from None
    except pa.ArrowInvalid:
        raise _no_table(path, "this is not Parquet") from None
    if _MARK not in (table.schema.metadata or {}):
        raise _no_table(path, "this is some other table")
    if missing := [name for name in ("point", *COLUMNS) if name not in table.column_names]:
        raise _no_table(path, f"of another version of Trilane: it lacks {', '.join(missing)}")
    return table


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
