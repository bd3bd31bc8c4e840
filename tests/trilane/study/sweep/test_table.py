"""The table: columns and types that depend on the grid alone, and files that are none."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.small_sweeps import SMALL
from trilane.common.parquet_files import write_parquet
from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.code_fingerprint import code_fingerprint, fingerprint_of, sources_in
from trilane.study.sweep.grid import Grid, points
from trilane.study.sweep.sweep import Player
from trilane.study.sweep.table import COLUMNS, SETTING, frame_of, read_results, read_table, table_of


def made(grid: Grid) -> pa.Table:
    found = points(grid)
    return table_of(grid, [point.axes for point in found], [Player().row(point) for point in found])


def test_every_number_of_a_run_has_a_column() -> None:
    row = simulate(Scenario.from_dict(SMALL)).to_dict()
    assert set(row) <= set(COLUMNS)
    assert set(Scenario().to_dict()) <= set(COLUMNS)


def test_columns_and_types_are_the_same_whether_points_fail_or_not() -> None:
    base, axes = Scenario.from_dict(SMALL), ({"pcie_gbps": (8, 16.5), "batch": (1,), "link.copies": ("pinned",)},)
    good, bad = made(Grid(base, axes)), made(Grid(base.with_(trace="nowhere"), axes))
    assert all(bad["error"].to_pylist())
    assert not any(good["error"].to_pylist())
    assert good.schema == bad.schema
    assert good.schema.metadata == bad.schema.metadata
    assert good.column_names == ["point", "pcie_gbps", "link.copies", SETTING, *COLUMNS]
    assert pa.null() not in good.schema.types


def test_settings_of_one_policy_have_names_of_their_own() -> None:
    policies = ({"dali": {"window": 2}}, "dali{window: 8}", "dali", "fiddler")
    table = made(Grid(Scenario.from_dict(SMALL), ({"policy": policies},)))
    assert table[SETTING].to_pylist() == ["dali{window: 2}", "dali{window: 8}", "dali", "fiddler", "oracle"]
    assert table["policy"].to_pylist() == ["dali", "dali", "dali", "fiddler", "oracle"]
    alone = made(Grid(Scenario.from_dict(SMALL), ({"batch": (1,)},), clairvoyant=False))
    assert alone[SETTING].to_pylist() == [Scenario.from_dict(SMALL).policy]


def test_axes_have_the_narrowest_type_and_what_does_not_apply_is_empty() -> None:
    grid = Grid(
        Scenario.from_dict(SMALL),
        ({"policy": ("fiddler", "dali"), "parameters.window": (2, 4), "pcie_gbps": (8, 9.5)}, {"pcie": ("3x16",)}),
        clairvoyant=False,
    )
    table = made(grid)
    types = {name: str(table.schema.field(name).type) for name in ("parameters.window", "pcie_gbps", "pcie")}
    assert types == {"parameters.window": "int64", "pcie_gbps": "double", "pcie": "string"}
    assert table["parameters.window"].to_pylist() == [None, None, 2, 2, 4, 4, None]
    assert table["pcie_gbps"].to_pylist() == [8, 9.5, 8, 9.5, 8, 9.5, None]
    assert table["pcie"].to_pylist() == [None] * 6 + ["3x16"]


def test_a_frame_is_what_is_read_back(tmp_path: Path) -> None:
    table = made(Grid(Scenario.from_dict(SMALL), ({"batch": (1, 2)},)))
    write_parquet(table, tmp_path / "a.parquet")
    write_parquet(table, tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    frame = read_results(tmp_path / "a.parquet")
    pd.testing.assert_frame_equal(frame, frame_of(table))
    assert frame.attrs["axes"] == ["batch"]
    assert frame["tpot_ms"].dtype == np.float64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]


def test_what_is_no_table_of_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    with pytest.raises(SweepError, match=r"x\.parquet: there is no such file"):
        read_results(path)
    path.write_text("hello")
    with pytest.raises(SweepError, match="this is not Parquet"):
        read_results(path)
    path.write_bytes(b"")
    with pytest.raises(SweepError, match="this is not Parquet"):
        read_results(path)
    pd.DataFrame({"point": ["a"]}).to_parquet(path)
    with pytest.raises(SweepError, match="this is some other table"):
        read_results(path)
    table = made(Grid(Scenario.from_dict(SMALL), clairvoyant=False))
    write_parquet(table.drop_columns(["tpot_ms"]), path)
    with pytest.raises(SweepError, match="of another version of Trilane: it lacks tpot_ms"):
        read_table(path)
    with pytest.raises(SweepError, match=r"Is a directory"):
        read_results(tmp_path)


# --- what other people's files may hold -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> pa.Table:
    grid = {"policy": ("dali", "fiddler"), "parameters.window": (2, 4), "batch": (1, 99)}
    return made(Grid(Scenario.from_dict(SMALL), (grid,), clairvoyant=False))


def test_no_flipped_bit_of_a_table_is_read_as_another_number(table: pa.Table, tmp_path: Path) -> None:
    path, rng = tmp_path / "x.parquet", random.Random(3)
    write_parquet(table, path)
    whole = path.read_bytes()
    for bit in rng.sample(range(8 * len(whole)), 150):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = read_table(path)
        except SweepError:
            continue
        assert found.equals(table)
        assert (found.schema.metadata or {}).items() >= (table.schema.metadata or {}).items()  # a key may be unknown


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


@pytest.mark.parametrize(("name", "value", "says"), [
    ("tpot_ms", pa.scalar(1, pa.int64()), "tpot_ms is of another type"),
    ("batch", pa.scalar(1.5), "batch is of another type"),
    ("error", pa.scalar(b"x"), "error is of another type"),
    ("point", pa.scalar(1), "point is of another type"),
    ("parameters.window", pa.scalar([1]), "parameters.window is of another type"),
    ("error", pa.scalar(None, pa.string()), "error is missing in some rows"),
    ("labels", pa.scalar(None, pa.string()), "labels is missing in some rows"),
    ("labels", pa.scalar("["), "labels: not plain JSON"),
    ("labels", pa.scalar("{}"), "labels: expected a list"),
    ("parameters", pa.scalar("[]"), "parameters: expected a mapping"),
    ("hardware_overrides", pa.scalar('{"gpu": []}'), "hardware_overrides: gpu: expected"),
    ("engine_overrides", pa.scalar('{"replay_ns": []}'), "engine_overrides: replay_ns: expected"),
    ("sequences", pa.scalar('["a"]'), "sequences: [0]: expected a whole number"),
    ("sequences", pa.scalar(100_000 * "["), "sequences: not plain JSON"),
    ("tpot_ms", pa.scalar(float("inf")), "tpot_ms is infinite or not a number"),
    ("tpot_ms", pa.scalar(-1.0), "tpot_ms is negative"),
    ("draw", pa.scalar(-1), "draw is negative"),
])
def test_columns_that_no_sweep_writes(table: pa.Table, tmp_path: Path, name: str, value: Any, says: str) -> None:
    write_parquet(with_column(table, name, pa.repeat(value, len(table))), tmp_path / "x.parquet")
    with pytest.raises(SweepError, match=rf"x\.parquet: .*{re.escape(says)}"):
        read_results(tmp_path / "x.parquet")


@pytest.mark.parametrize("axes", [b"", b"{", b"7", b"[7]", b'["batches"]', b'["dram_gbps", "batch"]', b"\xff"])
def test_axes_that_the_table_does_not_have(table: pa.Table, tmp_path: Path, axes: bytes) -> None:
    write_parquet(table.replace_schema_metadata({b"trilane sweep": axes}), tmp_path / "x.parquet")
    with pytest.raises(SweepError, match=r"no sweep has written this: its (metadata name no axes|columns are not)"):
        read_results(tmp_path / "x.parquet")


def test_two_columns_of_one_name(table: pa.Table, tmp_path: Path) -> None:
    write_parquet(table.append_column("tpot_ms", table["tpot_ms"]), tmp_path / "x.parquet")
    with pytest.raises(SweepError, match="its columns are not those of its axes"):
        read_results(tmp_path / "x.parquet")


# --- an edited, renamed or new source is other code -------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[4]
FOLDERS = [ROOT / name for name in ("traces", "policies", "sim", "trilane/common")]


def test_sources_and_their_names_count(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    one = tmp_path / "policies" / "lru.py"
    checksums = []
    for text in ("a = 1", "a = 2"):
        one.write_text(text)
        checksums.append(fingerprint_of([tmp_path]))
    (tmp_path / "costs.yaml").write_text("a = 2")
    checksums.append(fingerprint_of([tmp_path]))
    one.rename(tmp_path / "lru.py")
    checksums.append(fingerprint_of([tmp_path]))
    assert len(set(checksums)) == 4
    (tmp_path / "lru.pyc").write_bytes(b"compiled")
    assert fingerprint_of([tmp_path]) == checksums[-1]


def test_what_no_simulation_follows_from_does_not_count() -> None:
    names = set(sources_in(FOLDERS))
    assert {"sim/simulate.py", "sim/timeline/timeline.py", "policies/registry.py", "traces/models/models.yaml"} < names
    for name in ("traces/capture/load.py", "traces/capture/capture.py"):
        assert (ROOT / name).exists()
        assert name not in names
    rooms = {"traces", "policies", "sim", "common"}
    assert {name.partition("/")[0] for name in names} == rooms, "no pages, no verbs"


def test_whatever_a_simulation_imports_counts() -> None:
    """In a process that does nothing else: with a bundled trace, and with one that is made up."""
    program = (
        "import json, sys\n"
        "import sim.simulate\n"
        "from trilane.study.sweep.grid import Grid, points\n"
        "from trilane.study.sweep.sweep import Player\n"
        "grid = {'scenario': json.loads(sys.argv[1]), 'grid': {'policy': ['dali', 'daop', 'smoe'],\n"
        "        'hardware': ['rtx3090-ddr4', 'rtx-4080+ddr5-5600']}}\n"
        "assert not any(Player().row(point)['error'] for point in points(Grid.from_dict(grid)))\n"
        "from traces.library import load_trace\n"
        "import traces.synthesis.named, traces.synthesis.synthetic_trace\n"
        "print(json.dumps([module.__file__ for module in list(sys.modules.values()) if getattr(module, '__file__', '')"
        "]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(SMALL)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {Path(name).resolve() for name in json.loads(done.stdout)}
    ours = {path for path in loaded if any(path.is_relative_to(folder) for folder in FOLDERS)}
    assert len(ours) > 80
    assert sorted(ours - set(sources_in(FOLDERS).values())) == []


def test_it_is_the_same_in_the_whole_process() -> None:
    assert code_fingerprint() == code_fingerprint()
