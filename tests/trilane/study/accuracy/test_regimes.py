"""Regimes of machines and splits, and the errors that are kept for them."""

from __future__ import annotations

import pytest

from tests.kit.measured_rows import row
from trilane.study.accuracy.errors import read_predictions
from trilane.study.accuracy.measured_rows import read_rows
from trilane.study.accuracy.regime_errors import FEWEST_ROWS, kept_errors, regime_error, regime_errors
from trilane.study.accuracy.regimes import REGIMES, regime_of_row


@pytest.mark.parametrize(
    ("machine", "cpu_layers", "regime"),
    [
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
    ],
)
def test_regimes_of_machines(machine: str, cpu_layers: int, regime: str) -> None:
    assert regime_of_row(row(machine=machine, cpu_layers=cpu_layers)) == regime


def test_vulkan_is_a_regime_where_there_is_a_card() -> None:
    assert regime_of_row(row(engine="llama.cpp-vulkan", cpu_layers=48)) == "Vulkan"
    assert regime_of_row(row(engine="llama.cpp-vulkan", machine="none+ddr4-3200", cpu_layers=48)) == "CPU only"


def test_some_experts_of_every_layer_on_the_gpu_are_mixed() -> None:
    assert regime_of_row(row(cpu_layers=48, gpu_experts=32)) == "mixed"


def test_kept_errors_are_those_of_the_held_out_predictions() -> None:
    rows = [each for each in read_rows() if not each.left_out]
    assert kept_errors() == regime_errors(rows, read_predictions()), (
        "renew them with: python -m tests.trilane.study.accuracy.renew"
    )


def test_a_regime_of_few_rows_has_no_error() -> None:
    for regime in REGIMES:
        found, kept = regime_error(regime), kept_errors().get(regime)
        assert (found is None) == (kept is None or kept.rows < FEWEST_ROWS)
    assert regime_error("mixed") is not None
