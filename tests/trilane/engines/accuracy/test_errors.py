"""Errors of predicted speeds, on rows of which every error is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.results import row
from trilane.engines.accuracy.errors import Errors, Speeds, error_of, error_table, family_of, read_predictions
from trilane.engines.accuracy.measured_rows import RowsError

OTHER = "rtx-4090+ddr5-5600+ryzen-9-7950x"
ROWS = [
    row("1", 100.0, prompt_tokens_per_s=1000.0, prompt_tokens=512), row("2", 50.0, cpu_layers=10), row("3", 20.0),
    row("4", 10.0, machine=OTHER, quality="B", weights="q8_0"), row("5", 10.0, quality="C"),
]
PREDICTED = {
    "1": Speeds(110.0, 1500.0), "2": Speeds(45.0), "3": Speeds(20.2), "4": Speeds(14.0), "5": Speeds(30.0),
}


def errors(quantity: str, by: str, group: str, predicted: dict[str, Speeds] = PREDICTED) -> Errors:
    return next(line.errors for line in error_table(ROWS, predicted) if line[:3] == (quantity, by, group))


def test_errors_are_predicted_over_measured_less_one() -> None:
    assert error_of(ROWS[0], PREDICTED, "decode") == pytest.approx(0.1)
    assert error_of(ROWS[0], PREDICTED, "prompts") == pytest.approx(0.5)
    assert error_of(ROWS[1], PREDICTED, "decode") == pytest.approx(-0.1)
    assert error_of(ROWS[1], PREDICTED, "prompts") is None


def test_statistics_of_all_rows() -> None:
    """+10, -10, +1 % on one machine, +40 % on another; a row of quality C is not among them."""
    found = errors("decode", "all", "all")
    assert (found.rows, found.machines) == (4, 2)
    assert found.median == pytest.approx(0.10)  # of 1, 10, 10, 40
    assert found.bias == pytest.approx(0.055)  # of -10, 1, 10, 40
    assert found.within_20 == 0.75
    assert found.by_machine == pytest.approx(0.25)  # of 10 and 40
    assert found.machines_within_25 == 1


def test_groups() -> None:
    assert errors("decode", "regime", "mixed").bias == pytest.approx(-0.1)
    assert errors("decode", "format", "q8_0").median == pytest.approx(0.4)
    assert errors("decode", "engine", "llama.cpp") == errors("decode", "all", "all")
    assert errors("decode", "model family", "qwen3") == errors("decode", "all", "all")
    assert errors("prompts", "all", "all").rows == 1


def test_quality_c_is_shown_apart() -> None:
    assert errors("decode", "quality", "C").median == pytest.approx(2.0)


def test_a_broken_prediction_is_seen() -> None:
    broken = {name: Speeds(None if speeds.decode is None else 2 * speeds.decode) for name, speeds in PREDICTED.items()}
    assert errors("decode", "all", "all", broken).bias == pytest.approx(1.11)
    assert errors("decode", "all", "all", broken).within_20 == 0


def test_rows_without_a_prediction_do_not_count() -> None:
    assert errors("decode", "all", "all", {"1": Speeds(110.0)}).rows == 1
    assert error_table(ROWS, {}) == []


@pytest.mark.parametrize(
    ("model", "family"),
    [("qwen3-30b-a3b", "qwen3"), ("deepseek-v2-lite", "deepseek-v2"), ("gpt-oss-20b", "gpt-oss"),
     ("qwen3-next-80b-a3b", "qwen3-next"), ("glm-4.7-flash", "glm-4.7"), ("qwen3.6-35b-a3b", "qwen3.6")],
)
def test_families(model: str, family: str) -> None:
    assert family_of(row(model=model)) == family


@pytest.mark.parametrize(
    "text", ["id,decode_tokens_per_s\n1,2\n", "id,decode_tokens_per_s,prompt_tokens_per_s\n1,x,\n"]
)
def test_predictions_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(RowsError, match="expected a CSV file of predicted speeds"):
        read_predictions(tmp_path / "p.csv")
