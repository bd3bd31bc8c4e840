"""Memory of a split: layers on the CPU, compute buffers, the longest prompt, and what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.kit.fit_questions import GEMMA, QWEN, answered, splitter
from traces.models.catalogue import load_model
from trilane.engines.question import FitError, Question
from trilane.engines.split_speed import StaticSplit
from trilane.fit.fit import fit, with_longest_prompt


def test_the_fewest_layers_are_on_the_cpu_that_leave_room_for_the_rest() -> None:
    one, own = answered(**QWEN), splitter(**QWEN)
    assert one.memory.missing_bytes <= 0
    assert own.memory(StaticSplit(one.cpu_layers - 1)).missing_bytes > 0
    layer = load_model("qwen3-30b-a3b@q4_k_m").routed_bytes / 48
    assert one.memory.experts_bytes == pytest.approx((48 - one.cpu_layers) * layer, rel=0.05)
    assert one.memory.experts_bytes + one.memory.host_bytes == load_model("qwen3-30b-a3b@q4_k_m").routed_bytes


@pytest.mark.parametrize(
    ("model", "mib"), [("qwen3-30b-a3b", 300.75), ("qwen3.6-35b-a3b", 493)], ids=["Qwen3-30B", "Qwen3.6-35B"]
)
def test_memory_is_within_three_percent_of_what_logs_of_older_builds_say(model: str, mib: float) -> None:
    """Builds of 2025 used the room of the inputs again for the logits: 16 MiB less in compute buffers, and a mask."""
    memory = splitter(model=model, gpu="rtx-5090", ram="ddr5-5600", prompt_tokens=4096).memory(StaticSplit(40))
    ours = memory.every_token_bytes + memory.kv_bytes + memory.compute_bytes + memory.experts_bytes
    logged = ours - memory.compute_bytes + mib * 2**20
    assert 0 <= ours / logged - 1 < 0.03


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        ({"model": "qwen3.5-35b-a3b", "gpu": "rtx-5060-ti-16gb", "ram": "ddr5-5600", "prompt_tokens": 16_000}, 14),
        ({"model": "qwen3.6-35b-a3b", "weights": "iq4_xs", "gpu": "rtx-3060", "ram": "ddr4-3200",
          "prompt_tokens": 1470}, 18),
        ({"model": "qwen3-30b-a3b", "gpu": "rtx-5070", "ram": "ddr5-5600", "prompt_tokens": 512}, 22),
        ({"model": "gpt-oss-120b", "gpu": "rtx-3090", "ram": "ddr4-3200", "prompt_tokens": 1400}, 27),
    ],
    ids=lambda value: str(value["model"]) if isinstance(value, dict) else "",
)
def test_people_put_nearly_as_many_layers_on_the_cpu(asked: dict[str, Any], layers: int) -> None:
    """N of --n-cpu-moe of speeds that were measured on these cards (measured_speeds.csv; everett6/moe-prefetch)."""
    assert abs(answered(**asked).cpu_layers - layers) <= 3


def test_experts_that_are_copied_have_room_by_matrix_or_by_layer() -> None:
    """Mixtral: eight experts of 3 x 4,096 x 14,336; two results of two experts for each of 512 tokens, or one and what
    comes of it; inputs are four rows of 4,096, and a mask of 4,352 cells."""
    own, shape = splitter(**{**QWEN, "model": "mixtral-8x7b"}), load_model("mixtral-8x7b@q4_k_m")
    layer, inputs = 8 * shape.expert_bytes_by_layer[0], 512 * (4 * 4096 * 4 + 4352 * 2)
    assert own.memory(StaticSplit(1)).compute_bytes == layer // 3 + 512 * 4 * 2 * 2 * 14_336 + inputs
    other = splitter(**{**QWEN, "model": "mixtral-8x7b", "engine": "ik_llama.cpp"})
    expected = layer + other.piece_tokens * (4 * 2 * 2 * 14_336 + 4 * 4096 * 4 + 4352 * 2)
    assert other.memory(StaticSplit(1)).compute_bytes == expected


def test_larger_pieces_have_more_room() -> None:
    larger = splitter(**QWEN, ubatch=2048).memory(StaticSplit(0))
    assert larger.compute_bytes == 4 * splitter(**QWEN).memory(StaticSplit(0)).compute_bytes
    assert answered(**QWEN, ubatch=4096).cpu_layers > answered(**QWEN).cpu_layers


def test_a_sliding_window_and_a_quantised_cache_leave_room_for_experts() -> None:
    """gemma-4: 25 of 30 layers keep 1,024 tokens."""
    one = answered(**GEMMA, prompt_tokens=32_768)
    assert one.memory.kv_bytes / 1e9 < 1.0
    small, usual = (answered(**GEMMA, prompt_tokens=131_072, kv=kv) for kv in ("q4_0", None))
    assert small.cpu_layers < usual.cpu_layers


def test_what_leaves_no_room_is_refused_with_what_is_missing() -> None:
    with pytest.raises(FitError, match=r"llama.cpp with the experts of 2 layers on the CPU needs .* GB are missing"):
        answered(**QWEN, n_cpu_moe=2)
    with pytest.raises(FitError, match=r"llama.cpp: host memory is short: .* GiB would do"):
        answered(**{**QWEN, "weights": "bf16"}, ram_gb=32)


def test_the_longest_prompt_is_no_longer_than_the_model_was_trained_for() -> None:
    asked = with_longest_prompt(Question("qwen3-30b-a3b", "rtx-4090", "ddr5-5600", generated=200))
    assert asked.prompt_tokens == (40_960 - 200) // 256 * 256
    assert fit(replace(asked, generated=2)).trained_tokens == 40_960


def test_the_longest_prompt_fits_and_a_longer_one_does_not() -> None:
    own: dict[str, Any] = {"model": "qwen3-30b-a3b-instruct-2507", "gpu": "rtx-3060", "ram": "ddr4-3200", "kv": "q8_0"}
    asked = with_longest_prompt(Question(**own))
    assert asked.prompt_tokens % 256 == 0
    assert splitter(**own, prompt_tokens=asked.prompt_tokens).best()
    with pytest.raises(FitError):
        splitter(**own, prompt_tokens=asked.prompt_tokens + 512).best()
