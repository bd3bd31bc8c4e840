"""Rows of speeds: some set numbers of a kind of programs, the others are predicted with it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sim.costs.engine import load_engine
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import simulate
from trilane.output.pages.calibration import calibration_page
from trilane.study import calibration_rows
from trilane.study.calibrate import CalibrationError, SpeedQuantity, value_in
from trilane.study.calibration_rows import calibrate_rows, read_speed_rows, write_engine, write_template
from trilane.study.kinds import ends_of

FIELDS: dict[str, Any] = {"policy": "on-demand", "prompt_tokens": 8, "generated_tokens": 4}
PLANTED = {"software.layer_ns": 1.7e6, "software.link_share": 0.45}
ASKED: Sequence[tuple[SpeedQuantity, float]] = (
    ("tpot_ms", 0.5), ("tokens_per_s", 0.2), ("ttft_ms", 0.5), ("prompt_tokens_per_s", 0.7), ("tokens_per_s", 0.6),
)


def rows_file(folder: Path, numbers: Mapping[str, float], put_in: int = 1, slower: float = 1.0) -> Path:
    """Speeds of a program with these numbers; ``slower``: of all but those that are put in, as nothing makes them."""
    lines: list[Sequence[object]] = [("id", "quantity", "value", "put_in", *FIELDS, "cached_share", "source")]
    for place, (quantity, share) in enumerate(ASKED):
        scenario = Scenario(**FIELDS, cached_share=share, engine="eager", engine_overrides=numbers)
        value = value_in(simulate(scenario), quantity)
        if place >= put_in:
            value *= 1 / slower if quantity.endswith("_per_s") else slower
        lines.append((f"r{place}", quantity, value, "yes" if place < put_in else "no", *FIELDS.values(), share, "test"))
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def test_planted_numbers_are_found_again_and_predict_the_others(tmp_path: Path) -> None:
    rows = read_speed_rows(rows_file(tmp_path, PLANTED, put_in=2), "eager")
    found = calibrate_rows(rows, "eager")
    assert found.numbers == pytest.approx(PLANTED, rel=0.02)
    assert found.put_in == ["r0", "r1"]
    assert found.median_error is not None
    assert found.median_error < 0.01
    assert all(each.ends and each.ends[0] < each.row.play.value < each.ends[1] for each in found.rows)


def test_one_row_sets_the_first_number_of_the_kind(tmp_path: Path) -> None:
    planted = {"software.layer_ns": 1.1e6}
    found = calibrate_rows(read_speed_rows(rows_file(tmp_path, planted), "eager"), "eager")
    assert found.numbers == pytest.approx(planted, rel=0.01)


def test_a_broken_twin_rows_that_no_program_has_made_are_not_predicted(tmp_path: Path) -> None:
    found = calibrate_rows(read_speed_rows(rows_file(tmp_path, PLANTED, put_in=2, slower=1.5), "eager"), "eager")
    assert found.numbers == pytest.approx(PLANTED, rel=0.02)
    assert found.median_error == pytest.approx(0.5, abs=0.02)  # two speeds; the third row is a time


def test_a_time_below_that_of_the_machine_alone_names_what_would_have_to_change(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {})
    path.write_text(path.read_text().replace(path.read_text().splitlines()[1].split(",")[2], "0.5"))
    says = r"r0: 0.5 tpot_ms cannot be met: the machine alone, .* comes to \d.*; what would have to change is copies: "
    with pytest.raises(CalibrationError, match=says):
        calibrate_rows(read_speed_rows(path, "eager"), "eager")


def test_a_time_that_only_other_numbers_explain_names_these(tmp_path: Path) -> None:
    rows = read_speed_rows(rows_file(tmp_path, {"software.layer_ns": 1e5, "software.copy_ns": 1e9}), "eager")
    with pytest.raises(CalibrationError, match=r"no value of .* times as long .*change .*software.copy_ns.* and try"):
        calibrate_rows(rows, "eager")


def test_the_engine_that_is_written_plays_the_same_and_its_range_is_narrower(tmp_path: Path) -> None:
    rows = read_speed_rows(rows_file(tmp_path, PLANTED), "eager")
    found = calibrate_rows(rows, "eager")
    write_engine(found, path := tmp_path / "mine.yaml", "rows.csv")
    mine = load_engine(str(path))
    assert {key: mine.flat()[key].value for key in found.numbers} == dict(found.numbers)
    assert mine.flat()["software.layer_ns"].source == "calibrated: r0 of rows.csv"
    scenario = rows[1].play.scenario
    assert value_in(simulate(scenario.with_(engine=str(path))), "tokens_per_s") == found.rows[1].simulated
    ends = ends_of(scenario.with_(engine=str(path)))
    assert ends is not None
    assert {end.engine_overrides["software.layer_ns"] for end in ends} == {found.numbers["software.layer_ns"]}


def test_the_page_says_what_was_put_in(tmp_path: Path) -> None:
    found = calibrate_rows(read_speed_rows(rows_file(tmp_path, PLANTED, put_in=2), "eager"), "eager")
    words = " ".join(part for part in calibration_page(found) if isinstance(part, str))
    assert "3 rows predicted: median error 0%, 3 within 15 %; 3 are in the range" in words


def test_the_template_is_such_a_file(tmp_path: Path) -> None:
    write_template(tmp_path / "t.csv")
    rows = read_speed_rows(tmp_path / "t.csv", "eager")
    assert [row.put_in for row in rows] == [True, False, False]
    assert rows[0].play.scenario.with_(cached_share=0.25) == rows[1].play.scenario


def test_a_row_may_name_the_file_of_its_scenario(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("policy: fiddler\nbatch: 2\ncached_share: 0.5\n")
    lines = ("id,quantity,value,put_in,scenario,batch", "a,tpot_ms,5,yes,s.yaml,", "b,ttft_ms,9,,s.yaml,1")
    (tmp_path / "r.csv").write_text("\n".join(lines))
    first, second = (row.play.scenario for row in read_speed_rows(tmp_path / "r.csv", "eager"))
    assert (first.policy, first.batch, second.batch, second.engine) == ("fiddler", 2, 1, "eager")


@pytest.mark.parametrize(("text", "says", "error"), [
    ("id,quantity,value\na,tpot_ms,5\n", r"r.csv: expected 1 to 3 rows with put_in yes, got 0", CalibrationError),
    ("id,quantity,value,put_in\na,tpot_ms,0,yes\n", r"row a: value: expected a number above 0", CalibrationError),
    ("id,quantity,value,put_in\na,speed,1,yes\n", r"line 2: quantity: expected .*tpot_ms", CalibrationError),
    ("id,quantity,value,put_in,modle\na,tpot_ms,1,yes,x\n", r"no column 'modle'; did you mean", CalibrationError),
    ("id,quantity,value,put_in,batch\na,tpot_ms,1,yes,0\n", r"r.csv, row a: batch: expected a whole", ScenarioError),
    ("id,quantity,value,put_in,batch\na,tpot_ms,1,yes,[\n", r"r.csv, row a: batch: not plain YAML", CalibrationError),
])
def test_files_that_are_no_such_rows(tmp_path: Path, text: str, says: str, error: type[Exception]) -> None:
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(error, match=says):
        read_speed_rows(tmp_path / "r.csv", "eager")


def test_more_rows_than_a_kind_has_numbers_and_engines_that_are_no_kind(tmp_path: Path) -> None:
    rows = read_speed_rows(rows_file(tmp_path, {}), "pytorch")
    with pytest.raises(CalibrationError, match=r"'pytorch': expected a kind of programs, such as eager"):
        calibrate_rows(rows, "pytorch")
    assert calibration_rows.MOST_PUT_IN == 3
