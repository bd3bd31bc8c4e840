"""Values of axes: in words, and where they stand."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from sim.pictures.axis_words import by_ratio, places, setting_words, style_values, value_text, value_words


@pytest.mark.parametrize(
    ("name", "value", "text", "words"),
    [
        ("cached_share", 0.3, "30%", "30% cached"),
        ("cached_share", 1 / 7, "14.3%", "14.3% cached"),
        ("batch", 4, "4", "batch 4"),
        ("pcie_gbps", 16.0, "16", "16 GB/s"),
        ("prompt_tokens", 1024, "1,024", "1,024 tokens"),
        ("pcie", "5x16", "5x16", "PCIe 5x16"),
        ("hardware", "rtx3090-ddr4", "rtx3090-ddr4", "rtx3090-ddr4"),
        ("parameters.window", 8, "8", "window 8"),
    ],
)
def test_words(name: str, value: Any, text: str, words: str) -> None:
    assert value_text(name, value) == text
    assert value_words(name, value) == words


def test_a_setting_names_what_has_the_value() -> None:
    assert setting_words("pcie_gbps", 16.0) == "PCIe bandwidth 16 GB/s"
    assert setting_words("batch", 4) == "batch 4"
    assert setting_words("hardware", "rtx3090-ddr4") == "rtx3090-ddr4"


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 4, 8, 16], True), ([8.0, 64.0], False), ([0.1, 0.3, 0.5, 0.7], False), ([0, 1, 10, 100], False),
     ([1, 2, 3], False)],
)  # fmt: skip
def test_ratios(values: list[float], expected: bool) -> None:
    assert by_ratio(values) is expected


def test_numbers_stand_where_they_are_and_names_side_by_side() -> None:
    assert places([8, 64]) == {8: 8.0, 64: 64.0}
    assert places(["3x16", "5x16"]) == {"3x16": 0.0, "5x16": 1.0}


def test_axes_have_names_units_and_ticks_at_the_values() -> None:
    ax = Figure().subplots()
    style_values(ax, "batch", [1, 4, 16])
    assert (ax.get_xlabel(), ax.get_xscale()) == ("batch (sequences)", "log")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "4", "16"]
    ax = Figure().subplots()
    style_values(ax, "hardware", ["rtx-4090+ddr4-3200", "a100"])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["rtx-4090\n+ddr4-3200", "a100"]


def test_a_single_value_stands_in_the_middle() -> None:
    ax = Figure().subplots()
    style_values(ax, "pcie_gbps", [16.0])
    assert ax.get_xlim() == (8.0, 24.0)
