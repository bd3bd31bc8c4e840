"""Values of axes: in words, and where they stand."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from trilane.figures.axis_words import by_ratio, places, setting_words, style_values, value_text, value_words


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
        ("parameters.window", "default", "default", "default window"),
        ("gpu.memory_bytes", 8e9, "8 GB", "8 GB"),
        ("gpu.memory_bytes", 8e8, "800,000,000", "800,000,000 bytes"),
        ("link.h2d_bytes_per_s", 12.5e9, "12.5 GB/s", "12.5 GB/s"),
        ("gpu_memory_gb", None, "the card's own", "the card's own memory"),
        ("gpu_memory_gb", "the card's own", "the card's own", "the card's own memory"),
        ("prompt_tokens", None, "as recorded", "prompts as recorded"),
        ("model", None, "the trace's own", "the trace's own model"),
        ("pcie_gbps", None, "the machine's own", "the machine's own PCIe bandwidth"),
        ("parameters", '{"window":2,"evict":"idlest"}', "window=2, evict=idlest", "window=2, evict=idlest"),
    ],
)
def test_words(name: str, value: Any, text: str, words: str) -> None:
    assert value_text(name, value) == text
    assert value_words(name, value) == words


def test_a_setting_names_what_has_the_value() -> None:
    assert setting_words("pcie_gbps", 16.0) == "PCIe bandwidth 16 GB/s"
    assert setting_words("batch", 4) == "batch 4"
    assert setting_words("gpu.memory_bytes", 8e9) == "gpu memory 8 GB"
    assert setting_words("gpu_memory_gb", None) == "the card's own memory"
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


def test_many_bytes_are_read_in_gb() -> None:
    for rates in ([8e9 + 1e9 * step for step in range(12)], [1e9 * 2**step for step in range(12)]):
        ax = Figure().subplots()
        style_values(ax, "link.h2d_bytes_per_s", rates)
        ax.set_xlim(rates[0], rates[-1])
        assert "10 GB/s" in [label.get_text() for label in ax.get_xticklabels()]


def test_a_single_value_stands_in_the_middle() -> None:
    ax = Figure().subplots()
    style_values(ax, "pcie_gbps", [16.0])
    assert ax.get_xlim() == (8.0, 24.0)
