"""Values that no table could hold are refused before a point is played, and a journal with such rows is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.small_sweeps import SMALL, keep
from trilane.common.errors import TrilaneError
from trilane.study.sweep import sweep as sweep_file
from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.grid import Grid, points
from trilane.study.sweep.sweep import Player, sweep

FAR = 2**63


def refuse_to_play(*given: Any) -> Any:
    raise AssertionError("a point was played")


@pytest.mark.parametrize(("changes", "says"), [
    ({"grid": {"batch": [1, FAR]}}, "batch.*at most 64 bits"),
    ({"grid": {"seed": [FAR - 1]}, "draws": 2}, r"seed: expected room for the 2 draws below 2\^63"),
    ({"grid": {"seed": [-FAR - 1]}}, "at most 64 bits"),
    ({"grid": {"parameters.window": [FAR]}}, "at most 64 bits"),
    ({"grid": {"link.h2d_bytes_per_s": [10**30]}}, "at most 64 bits"),
    ({"grid": {"sequences": [[FAR]]}}, "at most 64 bits"),
    ({"grid": {"policy": [{"dali": {"window": FAR}}]}}, "at most 64 bits"),
    ({"grid": {"parameters": [{"window": FAR}]}}, "at most 64 bits"),
    ({"scenario": {**SMALL, "seed": FAR}}, "seed: expected a whole number of at most 64 bits"),
    ({"scenario": {**SMALL, "seed": FAR - 3}, "draws": 4}, "seed: expected room for the 4 draws"),
    ({"scenario": {**SMALL, "parameters": {"window": FAR}}}, "at most 64 bits"),
    ({"grid": {"pcie_gbps": [8, float("nan")]}}, "pcie_gbps.*expected a number, got nan"),
    ({"grid": {"parameters.alpha": [float("inf")]}}, "parameters.alpha.*expected a number, got inf"),
    ({"grid": {"gpu_memory_gb": [float("nan")]}}, "expected a number, got nan"),
    ({"grid": {"hardware": ["\ud800"]}}, "text without NUL"),
    ({"grid": {"link.copies": ["pinned", "a\0b"]}}, "text without NUL"),
    ({"grid": {"pcie": ["\udfff"]}}, "text without NUL"),
    ({"scenario": {**SMALL, "trace": "\ud800"}}, "text without NUL"),
    ({"draws": FAR}, "at most 64 bits"),
    ({"grid": {"parameters.window": [1, {None: 1, 2: 3}]}}, r"grid\.parameters.window\[1\]: expected text"),
    ({"grid": {"pcie": [{None: 1, True: 2, 1.5: 3}]}}, r"grid\.pcie\[0\]: expected text, got null"),
])
def test_values_that_no_table_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(sweep_file, "played_rows", refuse_to_play)
    with pytest.raises(SweepError, match=says):
        sweep({"scenario": SMALL, **changes}, tmp_path / "o.parquet")
    assert list(tmp_path.iterdir()) == []


def test_so_are_those_of_a_grid_that_is_made_in_python() -> None:
    for value in (FAR, float("nan"), "\ud800", [FAR], {"a": float("inf")}):
        with pytest.raises(TrilaneError):
            Grid(axes=({"parameters.window": (1, value)},))


@pytest.mark.parametrize(("name", "values", "kept"), [
    ("parameters.window", (2, "four"), ["2", "four"]),
    ("parameters.window", (2, True), ["2", "true"]),
    ("pcie_gbps", (8.5, 2**60 + 1), [8.5, float(2**60)]),
    ("link.copies", (None, "pinned"), [None, "pinned"]),
    ("parameters.window", ([1], {"a": 1.5}), ["[1]", '{"a":1.5}']),
])
def test_mixed_types_of_an_axis_have_a_column(
    tmp_path: Path, name: str, values: tuple[Any, ...], kept: list[Any]
) -> None:
    grid = {"scenario": SMALL, "grid": {name: list(values)}, "clairvoyant": False}
    frame = sweep(grid, tmp_path / "o.parquet")
    assert frame[name].astype(object).where(frame[name].notna(), None).tolist() == kept


@pytest.mark.parametrize(("changes", "says"), [
    ({"tpot_ms": "fast"}, "a value is not of the type of its column"),
    ({"tpot_ms": float("nan")}, "tpot_ms is infinite"),
    ({"batch": FAR}, "is beyond 64 bits"),
    ({"batch": 1.5e300}, "a value is not of the type"),
    ({"batch": None}, "batch is missing"),
    ({"error": None}, "error is missing"),
    ({"error": 0}, "a value is not of the type"),
    ({"labels": "[" * 9999}, "labels: not plain JSON"),
    ({"hardware": "\ud800"}, "surrogates not allowed"),
    ({"other": 1}, "a row has other columns"),
])
def test_a_journal_with_rows_that_no_sweep_has_made(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    grid = Grid.from_dict({"scenario": SMALL, "clairvoyant": False})
    output, journal = tmp_path / "o.parquet", tmp_path / "o.parquet.journal"
    keep(output, [{**Player().row(points(grid)[0]), **changes}])
    before = journal.read_bytes()
    with pytest.raises(SweepError, match=rf"o\.parquet\.journal: .*{says}.*; move it away"):
        sweep(grid, output)
    assert [(path, path.read_bytes()) for path in tmp_path.iterdir()] == [(journal, before)]
