"""Errors of predicted speeds, on rows of which every error is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from sim.costs.engine import load_fitted
from tests.kit.results import row
from trilane.engines.accuracy.errors import (
    FEWEST_MACHINES,
    REGIMES,
    Errors,
    Regime,
    Speeds,
    error_of,
    error_table,
    family_of,
    kept_errors,
    read_predictions,
    regime_error,
    regime_errors,
    regime_of_row,
)
from trilane.engines.accuracy.measured_rows import RowsError, read_rows

OTHER = "rtx-4090+ddr5-5600+ryzen-9-7950x"
ROWS = [
    row("1", 100.0, prompt_tokens_per_s=1000.0, prompt_tokens=512), row("2", 50.0, cpu_layers=10), row("3", 20.0),
    row("4", 10.0, machine=OTHER, quality="B", weights="q8_0"), row("5", 10.0, quality="C"),
]
PREDICTED = {"1": Speeds(110.0, 1500.0), "2": Speeds(45.0), "3": Speeds(20.2), "4": Speeds(14.0), "5": Speeds(30.0)}


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


# --- regimes ----------------------------------------------------------------------------------------------------------


UNKNOWN = replace(load_fitted("llama.cpp"), program="mine")


@pytest.mark.parametrize(("machine", "cpu_layers", "regime"), [
    ("rtx-4080+ddr5-5600+ryzen-9-7950x", 0, "all GPU"),
    ("rtx-4080+ddr5-5600+ryzen-9-7950x", 14, "mixed"),
    ("rtx-4080+ddr5-5600+ryzen-9-7950x", 48, "experts on CPU"),
    ("rtx-4080+ddr4-3200-ecc+threadripper-pro-5975wx", 48, "server"),
    ("rtx-3090+ddr5-6000-ecc+epyc-9355", 10, "server"),
    ("rtx-3090+ddr5-6000-ecc+epyc-9355", 0, "all GPU"),
    ("none+ddr5-6000-ecc+epyc-9355", 48, "CPU only"),
    ("none+ddr4-2666+core-i7-8700", 48, "CPU only"),
    ("none+lpddr5x-7500+ryzen-ai-9-hx-370", 48, "laptop"),
    ("rtx-4060-laptop+ddr5-5600+core-i9-13900hk", 20, "laptop"),
    ("rtx-4070-laptop+ddr5-5600", 20, "laptop"),
    ("rtx-3060+ddr4-2666+core-i9-9900t", 20, "mixed"),
    ("gb10", 0, "unified"),
    ("strix-halo", 0, "unified"),
])
def test_regimes_of_machines(machine: str, cpu_layers: int, regime: str) -> None:
    assert regime_of_row(row(machine=machine, cpu_layers=cpu_layers)) == regime


def test_vulkan_is_a_regime_where_there_is_a_card() -> None:
    assert regime_of_row(row(engine="llama.cpp-vulkan", cpu_layers=48)) == "Vulkan"
    assert regime_of_row(row(engine="llama.cpp-vulkan", machine="none+ddr4-3200", cpu_layers=48)) == "CPU only"


def test_some_experts_of_every_layer_on_the_gpu_are_mixed() -> None:
    assert regime_of_row(row(cpu_layers=48, gpu_experts=32)) == "mixed"


def test_kept_errors_are_those_of_the_held_out_predictions() -> None:
    rows = [each for each in read_rows() if not each.left_out]
    assert kept_errors() == tuple(regime_errors(rows, read_predictions())), (
        "renew them with: python -m tests.trilane.engines.accuracy.renew"
    )


def test_every_machine_has_one_vote() -> None:
    """Three rows of one machine are 10 % off, one row of each of two others 50 and 60 %."""
    machines = ["rtx-4080+ddr5-5600"] * 3 + ["rtx-3060+ddr4-3200", "rtx-3090+ddr4-3200"]
    rows = [row(str(n), machine=name, cpu_layers=14) for n, name in enumerate(machines)]
    predicted = {str(n): Speeds(speed) for n, speed in enumerate((110.0, 110.0, 110.0, 50.0, 160.0))}
    whole, of_engine = regime_errors(rows, predicted)
    assert whole == ("mixed", "", 0.5, 1, 3, 5)
    assert of_engine == whole._replace(engine="llama.cpp")


def test_an_error_is_that_of_the_engine_where_enough_machines_ran_it() -> None:
    for (regime, engine), each in {each[:2]: each for each in kept_errors() if each.engine}.items():
        found = regime_error(cast("Regime", regime), load_fitted(engine))
        if each.machines >= FEWEST_MACHINES:
            assert found == each
            assert engine != "llama.cpp" or found == regime_error(cast("Regime", regime), load_fitted("llama.cpp-2025"))
        else:
            assert found is None or found.engine == ""
    assert regime_error("mixed", UNKNOWN) == next(each for each in kept_errors() if each[:2] == ("mixed", ""))


def test_a_regime_of_few_machines_has_no_error() -> None:
    for regime in REGIMES:
        whole = next((each for each in kept_errors() if each[:2] == (regime, "")), None)
        assert (regime_error(regime, UNKNOWN) is None) == (whole is None or whole.machines < FEWEST_MACHINES)
    assert regime_error("laptop", load_fitted("llama.cpp")) is None
