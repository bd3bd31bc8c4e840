"""Tables of earlier validations: read as they were written, predicted anew, and refused when they are anything else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sim.costs.engine import load_engine
from sim.machine.hardware import load_hardware
from trilane.engines.accuracy.measured_rows import RowsError
from trilane.study.validation.engine_validation import EngineRow, predicted_anew, read_rows, write_rows

ROWS = [
    EngineRow("olmoe-1b-7b@q4_0", None, 2, 2048, 1, 10, 50.5, 50.0, 51.25, 48.0, 12.0),
    EngineRow("olmoe-1b-7b@q4_0", None, 1, 0, 128, 2, 4000.0, 3999.0, 4001.0, 4100.0, 3900.0),
    EngineRow("olmoe-1b-7b@q4_0", 0, 1, 0, 128, 2, 40.0, 39.0, 41.0, 41.0, 39.0),
]
COMMITTED = Path("docs/validation/llama.cpp")


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_rows(ROWS, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == ROWS


@pytest.mark.parametrize("report", [COMMITTED, COMMITTED / "q8_0"], ids=["40 scenarios", "q8_0"])
def test_the_committed_rows_are_what_the_committed_engine_predicts(report: Path) -> None:
    """In the reports nothing was adjusted after the prediction."""
    engine, hardware = load_engine(str(COMMITTED / "engine.yaml")), load_hardware("none+ddr5-4800+2-cores+24gb")
    for row in read_rows(report / "rows.csv"):
        anew = predicted_anew(row, hardware, engine)
        assert anew.predicted_ms == pytest.approx(row.predicted_ms, rel=1e-4), row
        assert replace(anew, predicted_ms=row.predicted_ms) == row


@pytest.mark.parametrize(("row", "machine", "words"), [
    (ROWS[0], "rtx-4090+ddr5-5600", "measured without a GPU, expected a plan for such a machine"),
    (ROWS[2], "none+ddr5-5600", "measured with a GPU, expected a plan for such a machine"),
])
def test_times_of_another_kind_of_machine_are_not_predicted(row: EngineRow, machine: str, words: str) -> None:
    with pytest.raises(RowsError, match=words):
        predicted_anew(row, load_hardware(machine), load_engine(str(COMMITTED / "engine.yaml")))


@pytest.mark.parametrize(("change", "words"), [
    (lambda text: text.replace("threads", "cores"), "its first line lacks the columns threads"),
    (lambda text: text.splitlines()[0] + "\n", "expected at least one row"),
    (lambda text: text.replace(",10,", ",10,7,"), "line 2: more cells than columns"),
    (lambda text: re.sub(",48.0,12.0,.*", ",48.0", text), "line 2: missing key: null_ms"),
    (lambda text: text.replace("50.5", "nan"), "line 2: measured_ms: expected a number"),
    (lambda text: text.replace("50.5", "0"), "line 2: measured_ms: expected a number"),
    (lambda text: text.replace("@q4_0,0,", "@q4_0,-1,"), "line 4: n_cpu_moe: expected a whole number from 0 to"),
    (lambda text: text.replace(",2048,", ",-1,"), "line 2: depth: expected a whole number from 0 to"),
    (lambda text: text.replace(",2048,", ",1.5,"), "line 2: depth: expected a whole number .* got '1.5'"),
    (lambda text: text.replace("olmoe", '"olmoe'), "expected a table as in a report's rows.csv: "),
])
def test_anything_else_is_refused(change, words: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write_rows(ROWS, tmp_path / "rows.csv")
    text = (tmp_path / "rows.csv").read_text()
    assert change(text) != text
    (tmp_path / "rows.csv").write_text(change(text), encoding="utf-8")
    with pytest.raises(RowsError, match=words):
        read_rows(tmp_path / "rows.csv")
