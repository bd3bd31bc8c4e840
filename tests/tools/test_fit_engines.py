"""The fit of engines: its unknowns, its log_residuals on speeds that it made itself, and the files that it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.costs.engine import load_engine
from tools import fit_engines
from tools.fit_engines import ENGINES, engines_of, errors, fitted, log_residuals, read_starts, rows_to_fit
from trilane.engines.accuracy.measured_rows import MeasuredRow, predict

STARTS = read_starts()
ROW = MeasuredRow(
    id="1", model="qwen3-30b-a3b", weights="q4_k_m", machine="rtx-4080+ddr5-5600+ryzen-9-7950x", engine="llama.cpp",
    cpu_layers=0, decode_tokens_per_s=1, prompt_tokens=512, prompt_tokens_per_s=1, quality="A",
)


def made(changed: dict[str, float]) -> list[MeasuredRow]:
    """Rows of three machines as the engines would have it with other numbers."""
    engines = engines_of(STARTS, STARTS.logs)
    engine = engines["llama.cpp"]
    other = engine.with_numbers({key: engine.flat()[key].value * factor for key, factor in changed.items()})
    rows = [replace(ROW, machine=f"{gpu}+ddr5-5600+ryzen-9-7950x") for gpu in ("rtx-4080", "rtx-3090", "rtx-4090")]
    found = [predict(row, {"llama.cpp": other}) for row in rows]
    return [
        replace(row, decode_tokens_per_s=one.decode_tokens_per_s, prompt_tokens_per_s=one.prompt_tokens_per_s)
        for row, one in zip(rows, found, strict=True)
    ]


def test_numbers_start_alike_and_ratios_set_engines_apart() -> None:
    engines = {name: engine.flat() for name, engine in engines_of(STARTS, STARTS.logs).items()}
    start = STARTS.numbers["gpu.layer_ns.grouped"].start
    assert engines["llama.cpp"]["gpu.layer_ns.grouped"].value == pytest.approx(start)
    older = STARTS.ratios["older builds, layers"].start
    assert engines["llama.cpp-2025"]["gpu.layer_ns.grouped"].value == pytest.approx(older * start)
    both = older * STARTS.ratios["ik_llama.cpp, layers"].start
    assert engines["ik_llama.cpp-2025"]["gpu.layer_ns.grouped"].value == pytest.approx(both * start)
    repacked = STARTS.ratios["ik_llama.cpp, repacked products"].start * STARTS.numbers["cpu.thread_flops_per_s"].start
    assert engines["ik_llama.cpp"]["prompt.repacked_thread_flops_per_s"].value == pytest.approx(repacked)


def test_a_fit_to_its_own_speeds_stays_where_it_starts() -> None:
    rows = made({})
    assert np.allclose(log_residuals(STARTS.logs, STARTS, rows), 0, atol=1e-3)
    assert errors(rows[0], engines_of(STARTS, STARTS.logs)) == (pytest.approx(0), pytest.approx(0))


def test_a_fit_goes_where_the_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_engines, "EVALUATIONS", 10)
    monkeypatch.setattr(fit_engines, "START", 0.5)
    rows = made({"gpu.layer_ns.grouped": 1.3})
    before = abs(errors(rows[0], engines_of(STARTS, STARTS.logs))[0] or 0)
    after = abs(errors(rows[0], engines_of(STARTS, fitted(STARTS, rows)))[0] or 0)
    assert before > 0.05
    assert after < before / 3


def test_the_rows_are_those_with_one_assumption_at_most() -> None:
    rows = rows_to_fit()
    assert {row.quality for row in rows} == {"A", "B"}
    assert {row.engine for row in rows} <= set(ENGINES)
    assert not any(row.left_out for row in rows)


def test_engines_that_are_written_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_engines, "FOLDER", tmp_path)
    engines = engines_of(STARTS, STARTS.logs + 0.01)
    fit_engines.write_engines(engines, fit_engines._sources(STARTS, [ROW], 0.01))
    for name, engine in engines.items():
        again = load_engine(str(tmp_path / f"{name}.yaml"))
        assert again.about == engine.about
        if name == "llama.cpp":  # the others are like the engine of that name that comes with the simulator
            assert {key: number.value for key, number in again.flat().items()} == {
                key: pytest.approx(number.value, rel=6e-3) if isinstance(number.value, float) else number.value
                for key, number in engine.flat().items()
            }
            said = again.flat()["cpu.layer_ns"].source
            assert "the fit to 1 rows of 1 machines, which moves no number by more than 1 %" in said
