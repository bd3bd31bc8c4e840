"""``trilane sweep``: one file in, one table out; what failed, and how to go on, is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import Trilane
from tests.kit.small_sweeps import SMALL
from trilane.study.sweep import sweep as sweep_file
from trilane.study.sweep.table import read_results

GRID: dict[str, Any] = {"scenario": SMALL, "grid": {"batch": [1, 2]}}


def write(grid: Any) -> None:
    Path("f.yaml").write_text(json.dumps(grid))


def test_a_table_and_one_line(trilane: Trilane) -> None:
    write(GRID)
    done = trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1")
    assert done == (0, "", "4 points in o.parquet\n")
    assert list(read_results("o.parquet")["policy"]) == ["dali", "oracle"] * 2
    assert {path.name for path in Path().iterdir()} == {"f.yaml", "o.parquet"}


def test_points_that_fail_are_counted_by_reason(trilane: Trilane) -> None:
    write({"scenario": SMALL, "grid": {"batch": [1, 998, 999], "hardware": ["rtx3090-ddr4", "none"]}})
    done = trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1")
    first, *reasons = done.err.splitlines()
    assert (done.status, first) == (0, "12 points in o.parquet, 10 of them with an error:")
    assert [line.split(" x ")[0].strip() for line in reasons] == ["6", "4"]
    assert "HardwareError: no hardware preset or file 'none'" in reasons[0]
    assert "BatchError: " in reasons[1]


def test_where_nothing_can_be_played_the_status_says_so(trilane: Trilane) -> None:
    write({"scenario": {**SMALL, "batch": 999}, "clairvoyant": False})
    done = trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1")
    assert done.status == 1
    assert done.err.startswith("1 point in o.parquet, 1 of them with an error:\n")


def test_an_interrupt_says_what_is_kept_and_how_to_go_on(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    write(GRID)
    real = sweep_file.played_rows

    def play(tasks: Any, *how: Any) -> Any:
        played = real(tasks)
        yield from (next(played) for _ in range(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_file, "played_rows", play)
    done = trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1")
    assert done.status == 130
    assert "interrupted: 3 of 4 points are kept in o.parquet.journal; the same command continues from there" in done.err
    monkeypatch.setattr(sweep_file, "played_rows", lambda tasks, *how: real(tasks) if len(tasks) == 1 else 1 / 0)
    assert trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1").err == "4 points in o.parquet\n"


def test_the_help_says_where_rows_are_kept_and_when_they_are_simulated_again(trilane: Trilane) -> None:
    said = " ".join(trilane("sweep", "--help").out.replace("│", " ").split())
    for words in (
        "OUTPUT.journal",
        "are not simulated again as long as their scenario, its files and Trilane itself are the same",
        "is refused, never overwritten",
        "Its workers need the same Trilane, and the same files",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("f.yaml",), "Missing option '--output'"),
        (("g.yaml", "-o", "o.parquet"), "g.yaml: No such file"),
        (("bad.yaml", "-o", "o.parquet"), "bad.yaml: grid: there is no axis 'bath'; did you mean 'batch'?"),
        (("f.yaml", "-o", "o.csv"), "o.csv: expected the name of a Parquet file"),
        (("f.yaml", "-o", "f.yaml"), "expected another file than the input"),
        (("f.yaml", "-o", "none/o.parquet"), "the folder none does not exist"),
        (("f.yaml", "-o", "o.parquet", "--jobs", "0"), "Invalid value for '--jobs'"),
        (("f.yaml", "-o", "o.parquet", "--dask", "nowhere"), "--dask: expected an address such as tcp://"),
        (("f.yaml", "-o", "o.parquet", "--dask", "tcp://127.0.0.1:9"), "no Dask scheduler answers at 'tcp://127"),
        (("twice.yaml", "-o", "o.parquet"), "twice.yaml: pcie and pcie_gbps set the same number of the machine"),
    ],
)
def test_bad_input_is_one_sentence(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr("trilane.study.sweep.cluster.TIMEOUT", "1s")
    write(GRID)
    Path("bad.yaml").write_text("grid: {bath: 1}")
    Path("twice.yaml").write_text("grid: {pcie: 3x16, pcie_gbps: 8}")
    done = trilane("sweep", *words)
    assert (done.status, done.out) == (2, "")
    assert expected in done.err.splitlines()[-1]
    assert {path.name for path in Path().iterdir()} == {"f.yaml", "bad.yaml", "twice.yaml"}
