"""Regimes of machines and splits, and the errors that are kept for them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from sim.costs.engine import load_fitted
from tests.kit.results import row
from trilane.engines.accuracy.errors import Speeds, read_predictions, regime_errors, regime_of_row
from trilane.engines.accuracy.measured_rows import read_rows
from trilane.engines.accuracy.regimes import FEWEST_MACHINES, REGIMES, Regime, kept_errors, regime_error

UNKNOWN = replace(load_fitted("llama.cpp"), program="mine")


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
