"""The table of a sweep: one row a point, in the order of points; columns, types and bytes depend on the grid alone.

Next to the columns of its axes, every table has those of ``COLUMNS``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, get_type_hints

import pandas as pd
import pyarrow as pa
from pyarrow import compute

from policies.mechanism.routing_error import TOTALS
from sim.runs.metrics import METRIC_TYPES
from sim.runs.scenario import Scenario
from trilane.common.errors import TrilaneError
from trilane.common.json_text import parse_json
from trilane.common.parquet_files import read_parquet
from trilane.common.schema import from_dict
from trilane.study.policy_choice import policy_in, policy_label
from trilane.study.sweep.axes import SCENARIO_KEYS, SweepError, key_value
from trilane.study.sweep.grid import MOST_COMBINATIONS, Grid, canonical

WHOLE, NUMBER, TEXT, TRUTH = pa.int64(), pa.float64(), pa.string(), pa.bool_()
_ARROW = {bool: TRUTH, int: WHOLE, int | None: WHOLE, float: NUMBER, float | None: NUMBER}
_MEMORY = ("cache_bytes", "cache_slots", "staging_bytes")
_BOUNDS = ("lower_bound_ttft_ms", "lower_bound_tpot_ms", "null_model_tpot_ms")


COLUMNS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        # numbers as they are, all else (names, lists, mappings as JSON) as text
        **{name: _ARROW.get(hint, TEXT) for name, hint in get_type_hints(Scenario).items()},
        "draw": WHOLE,
        "labels": TEXT,
        **{name: _ARROW[kind] for name, kind in METRIC_TYPES.items()},
        **dict.fromkeys(TOTALS, NUMBER),
        "energy_j_per_token": NUMBER,
        **dict.fromkeys(_BOUNDS, NUMBER),
        **dict.fromkeys(_MEMORY, WHOLE),
        "cache_share": NUMBER,
        "trilane_version": TEXT,
        "trace_checksum": TEXT,
        "error": TEXT,
    }
)  # of every table, after the point's key and its axes
_ROW = pa.schema([("point", TEXT), *COLUMNS.items()])
_FILLED = (  # in every row
    "point", "trace", "hardware", "hardware_overrides", "policy", "parameters", "batch", "engine", "engine_overrides",
    "seed", "draw", "labels", "trilane_version", "trace_checksum", "error",
)
_SIGNED = ("seed",)
_JSON = (
    "hardware_overrides", "engine_overrides", "parameters", "sequences", "noisy_forecast_recall", "draft_acceptance",
)


def cell(kind: pa.DataType, value: Any) -> Any:
    """A value as a column of this type holds it: lists and mappings as JSON text, all numbers of NUMBER as floats."""
    if kind == TEXT:
        return value if value is None or isinstance(value, str) else canonical(value)
    return float(value) if kind == NUMBER and value is not None else value


def check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises SweepError for rows that a table cannot hold, or that no sweep has made."""
    if any(row.keys() != set(_ROW.names) for row in rows):
        raise SweepError("a row has other columns")
    try:
        table = pa.Table.from_pylist(list(rows), _ROW)
    except (pa.ArrowException, ArithmeticError, ValueError, TypeError):
        raise SweepError("a value is not of the type of its column") from None
    check_values(table)


def check_values(table: pa.Table) -> None:
    """Raises SweepError for the first column with values that no sweep writes; types are known to be right."""
    for name in _FILLED:
        if table[name].null_count:
            raise SweepError(f"{name} is missing in some rows")
    for field in table.schema:
        if field.type == NUMBER and compute.all(compute.is_finite(table[field.name])).as_py() is False:
            raise SweepError(f"{field.name} is infinite or not a number in some rows")
    for name in COLUMNS:
        if COLUMNS[name] != TEXT and name not in _SIGNED and (compute.min(table[name]).as_py() or 0) < 0:
            raise SweepError(f"{name} is negative in some rows")
    for text in compute.unique(table["labels"]).to_pylist():
        from_dict(tuple[str, ...], parse_json(text, "labels", SweepError), "labels", SweepError)
    for name in _JSON:
        for text in compute.unique(table[name]).drop_null().to_pylist():
            key_value(name, parse_json(text, name, SweepError))


Row: TypeAlias = Mapping[str, Any]

_MARK = b"trilane sweep"  # in the file's metadata: the names of its axes
SETTING = "policy_setting"  # the policy as the grid names it, with the parameters that are given there


def table_of(grid: Grid, axes: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> pa.Table:
    """Rows of points and, next to each, the point's values on the axes."""
    schema = _schema(grid)
    values = [{**at, **row, SETTING: _setting(at, row)} for at, row in zip(axes, rows, strict=True)]
    arrays = [pa.array([cell(f.type, each.get(f.name)) for each in values], f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _setting(axes: Mapping[str, Any], row: Row) -> str:
    """Policy of a row, such as ``dali{window: 8}``."""
    policy, parameters = policy_in(axes.get("policy", row["policy"]))
    return policy_label(policy, parameters) if policy == row["policy"] else str(row["policy"])


def _schema(grid: Grid) -> pa.Schema:
    """Columns and their types, which depend on the grid alone; an axis that is no key of a scenario has its own."""
    own = [name for name in grid.names if name not in SCENARIO_KEYS]
    axes = [(name, _type_of(value for each in grid.axes for value in each.get(name, ()))) for name in own]
    marked = {_MARK: json.dumps(grid.names).encode()}
    return pa.schema([("point", TEXT), *axes, (SETTING, TEXT), *COLUMNS.items()], metadata=marked)


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
    if missing := [name for name in ("point", SETTING, *COLUMNS) if name not in table.column_names]:
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
    if table.column_names != ["point", *axes, SETTING, *COLUMNS]:
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
