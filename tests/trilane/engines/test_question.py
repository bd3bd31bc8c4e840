"""What can be asked, and how parts and weights become names."""

from __future__ import annotations

from typing import Any

import pytest

from trilane.engines.question import FitError, Question, with_weights

PARTS: dict[str, Any] = {"gpu": "rtx-4080", "ram": "ddr5-5600"}


@pytest.mark.parametrize(
    ("more", "hardware"),
    [
        ({}, "rtx-4080+ddr5-5600"),
        ({"cores": 16}, "rtx-4080+ddr5-5600+16-cores"),
        (
            {"cpu": "ryzen-9-7950x", "cores": 8, "channels": 2, "pcie": "4x8"},
            "rtx-4080+ddr5-5600+ryzen-9-7950x+8-cores+2-channels+pcie-4x8",
        ),
        ({"cpu": "epyc-9355", "sockets": 2}, "rtx-4080+ddr5-5600+epyc-9355+2-sockets"),
    ],
)
def test_parts_make_the_name_of_a_machine(more: dict[str, Any], hardware: str) -> None:
    assert Question("qwen3-30b-a3b", **PARTS, **more).hardware == hardware


def test_one_memory_needs_no_other_and_has_the_size_that_is_asked() -> None:
    assert Question("qwen3-30b-a3b", gpu="gb10").hardware == "gb10"
    assert Question("qwen3-30b-a3b", gpu="none", ram="ddr5-5600", ram_gb=64).hardware == "none+ddr5-5600+64gb"
    with pytest.raises(FitError, match="expected gpu and ram"):
        Question("qwen3-30b-a3b", gpu="none")


def test_the_cache_of_keys_and_values_has_the_bits_of_its_format() -> None:
    bits = {kv: Question("gpt-oss-20b", **PARTS, kv=kv).model_shape.cache_bits for kv in (None, "f16", "q8_0", "q4_0")}
    assert bits == {None: 16, "f16": 16, "q8_0": 8.5, "q4_0": 4.5}


def test_a_whole_machine_is_its_own_name() -> None:
    assert Question("qwen3-30b-a3b", machine="rtx3090-ddr4").hardware == "rtx3090-ddr4"


@pytest.mark.parametrize(
    ("model", "weights", "shape"),
    [
        ("qwen3-30b-a3b", None, "qwen3-30b-a3b@q4_k_m"),
        ("qwen3-30b-a3b", "bf16", "qwen3-30b-a3b@bf16"),
        ("qwen3-30b-a3b@q8_0", None, "qwen3-30b-a3b@q8_0"),
        ("phi-3.5-moe:8", "q8_0", "phi-3.5-moe@q8_0:8"),
        ("gpt-oss-20b", None, "gpt-oss-20b@mxfp4"),
    ],
)
def test_weights_are_q4_k_m_unless_said_or_published_smaller(model: str, weights: str | None, shape: str) -> None:
    assert Question(model, **PARTS, weights=weights).shape == shape


def test_other_weights_replace_those_that_a_model_has() -> None:
    assert with_weights("phi-3.5-moe@q8_0:8", "bf16") == "phi-3.5-moe@bf16:8"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "expected gpu and ram"),
        ({"gpu": "rtx-4080"}, "expected gpu and ram"),
        ({"machine": "rtx3090-ddr4", "gpu": "rtx-4080", "cores": 8}, "got machine 'rtx3090-ddr4' and gpu and cores"),
        ({**PARTS, "prompt_tokens": 0}, "prompt_tokens: expected a whole number >= 1, got 0"),
        ({**PARTS, "batch": 1.5}, "batch: expected a whole number >= 1, got 1.5"),
        ({**PARTS, "ram_gb": -64}, "ram_gb: expected a whole number >= 1 or null, got -64"),
        ({**PARTS, "policy_engine": 3}, "policy_engine: expected text"),
        ({**PARTS, "kv": "q5_0"}, "kv: expected"),
        ({**PARTS, "n_cpu_moe": -1}, "n_cpu_moe: expected a whole number >= 0 or null, got -1"),
        ({**PARTS, "threads": 0}, "threads: expected a whole number >= 1 or null, got 0"),
        ({**PARTS, "weights": "q4", "model": "qwen3-30b-a3b@q8_0"}, "names its weights twice"),
    ],
)
def test_a_question_that_is_none_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(FitError, match=message):
        Question(**{"model": "qwen3-30b-a3b", **asked})
