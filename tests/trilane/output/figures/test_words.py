"""Words for values and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policies.baselines.best import TUNED_ON_SEQUENCES, TUNED_ON_TRACES, TUNED_POLICIES
from policies.registry import policy_names
from trilane.output.figures.words import sampled, setting_words, tuned, value_text, value_words


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


def test_tuned_policies_are_named_where_their_own_sequences_are_played() -> None:
    """The search played sequences 0 to 9 of both bundled traces (notebooks/search_compositions.py)."""
    remark = tuned(["dali", "best-exact"], "mini-moe:2", [3, 40])
    assert "best-exact was tuned on sequences 0 to 9" in remark
    assert tuned(["dali"], "mini-moe", [3]) == ""
    assert tuned(["best-exact"], "mini-moe", [10, 40]) == ""
    assert tuned(["best-exact"], "my-trace.safetensors", [3]) == ""


def test_tuned_policies_are_those_of_the_search() -> None:
    study = Path(__file__).parents[4] / "notebooks" / "search_compositions.py"
    code = study.read_text(encoding="utf-8")
    assert f"TUNING_SEQUENCES, HELD_OUT_SEQUENCES = {TUNED_ON_SEQUENCES!r}".replace("range(0, 10)", "range(10)") in code
    assert all(f'"{trace}' in code for trace in TUNED_ON_TRACES)
    assert set(TUNED_POLICIES) <= set(policy_names())


def test_a_sampled_answer_is_named_with_the_measured_error() -> None:
    assert sampled(60, 60, 1) == ""
    remark = sampled(32, 1000, 4)
    assert all(word in remark for word in ("32 of 1,000", "batch 4", "24 runs", "0.8%", "2.5%"))
    assert "not measured" not in remark
    assert "fewer than 24 were not measured" in sampled(8, 60, 1)
