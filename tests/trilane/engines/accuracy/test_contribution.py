"""Contributions: rows that are read back as they were, what is missing is asked for, and what is wrong is found."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trilane.engines.accuracy.test_outputs import TESTS
from tools.check_contribution import added, main
from trilane.common.csv_files import write_csv
from trilane.engines.accuracy.contribution import Given, cells, check_rows, contribution
from trilane.engines.accuracy.measured_rows import BUNDLED, MeasuredRow, read_rows
from trilane.engines.accuracy.outputs import speeds_in

OWN = Given(gpu="rtx 3060 12gb", ram="ddr4-3200")


def rows() -> tuple[MeasuredRow, ...]:
    import json

    return contribution(speeds_in(json.dumps(TESTS)), OWN).rows


def written(some: tuple[MeasuredRow, ...], path: Path) -> Path:
    write_csv(cells(some), path)
    return path


def test_rows_have_the_names_of_the_catalogue() -> None:
    first = rows()[0]
    assert (first.model, first.weights, first.engine) == ("qwen3-30b-a3b", "q4_k_m", "llama.cpp")
    assert first.machine == "rtx-3060+ddr4-3200+ryzen-5-5600"
    assert first.cpu_layers == 28


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    assert tuple(read_rows(written(rows(), tmp_path / "c.csv"))) == rows()


@pytest.mark.parametrize(("given", "option"), [
    (Given(gpu="rtx-3060"), "--ram"), (Given(ram="ddr4-3200", gpu=None), "--gpu"),
])
def test_what_is_missing_is_asked_for(given: Given, option: str) -> None:
    import json

    tests = [{**test, "gpu_info": ""} for test in TESTS]
    made = contribution(speeds_in(json.dumps(tests)), given)
    assert made.rows == ()
    assert [one.option for one in made.lacking] == [option]


def test_a_bundled_row_is_a_duplicate_and_another_speed_is_none() -> None:
    bundled = next(row for row in read_rows() if row.scored and row.decode_tokens_per_s)
    [check] = check_rows([replace(bundled, id="mine")])
    assert check.duplicate == bundled.id
    [other] = check_rows([replace(bundled, id="mine", decode_tokens_per_s=1.1 * bundled.decode_tokens_per_s)])
    assert other.duplicate is None


def test_a_speed_in_the_wrong_unit_is_suspect() -> None:
    [check] = check_rows([replace(rows()[1], decode_tokens_per_s=34_500.0)])
    assert check.suspect
    assert not check.well


def test_a_machine_that_is_not_well_has_a_cause() -> None:
    [check] = check_rows([replace(rows()[1], decode_tokens_per_s=15.0)])
    assert check.causes
    assert not check.suspect


def test_rows_that_are_well_are_added_with_their_source(tmp_path: Path) -> None:
    shutil.copyfile(BUNDLED, tmp_path / "rows.csv")
    before = read_rows(tmp_path / "rows.csv")
    bad = replace(rows()[1], decode_tokens_per_s=34_500.0)
    new = added(check_rows([rows()[0], bad]), "issue 7", tmp_path / "rows.csv")
    after = read_rows(tmp_path / "rows.csv")
    assert after[: len(before)] == before
    assert after[len(before):] == new
    assert [row.source for row in new] == ["issue 7"]


def test_the_script_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = replace(rows()[1], decode_tokens_per_s=34_500.0)
    assert main([str(written(rows(), tmp_path / "good.csv"))]) == 0
    assert main([str(written((fast,), tmp_path / "bad.csv"))]) == 1
    assert "far from the prediction: is the setting right?" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"a,b\n1,2\n"])
def test_a_file_that_cannot_be_read_is_a_sentence(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        main([str(path)])
    assert stop.value.code == 2
    assert "rows.csv" in capsys.readouterr().err
