"""The columns of a sweep's table, other than those of its axes: their types, and what they may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, get_type_hints

import pyarrow as pa
from pyarrow import compute

from policies.mechanism.routing_error import TOTALS
from sim.runs.metrics import METRIC_TYPES
from sim.runs.scenario import Scenario
from trilane.common.json_text import parse_json
from trilane.common.schema import from_dict
from trilane.study.sweep.axes import SweepError, key_value
from trilane.study.sweep.grid import canonical

WHOLE, NUMBER, TEXT, TRUTH = pa.int64(), pa.float64(), pa.string(), pa.bool_()
_ARROW = {bool: TRUTH, int: WHOLE, int | None: WHOLE, float: NUMBER, float | None: NUMBER}
_MEMORY = ("cache_bytes", "cache_slots", "staging_bytes")
_BOUNDS = ("lower_bound_ttft_ms", "lower_bound_tpot_ms", "null_model_tpot_ms")


def _columns_of(kind: type) -> dict[str, pa.DataType]:
    """Numbers as they are, all else (names, lists, mappings as JSON) as text."""
    hints = get_type_hints(kind)
    return {f.name: _ARROW.get(hints[f.name], TEXT) for f in fields(kind)}


COLUMNS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        **_columns_of(Scenario),
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
    "point", "trace", "hardware", "hardware_overrides", "policy", "parameters", "batch", "engine", "seed", "draw",
    "labels", "trilane_version", "trace_checksum", "error",
)  # fmt: skip
_SIGNED = ("seed",)
_JSON = ("hardware_overrides", "parameters", "sequences", "noisy_forecast_recall", "draft_acceptance")


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
