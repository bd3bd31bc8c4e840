"""What fits, to the byte; and refusals, which say by how many GB and what would do."""

from __future__ import annotations

from typing import Any

import pytest

from sim.fit.fits import GIB, HOST_RESERVE_BYTES, all_on_gpu, check_fits, need_of
from sim.fit.question import FitError, Question
from sim.machine.hardware import Hardware, load_hardware
from traces.catalogue import load_model
from traces.model_shape import ModelShape

RESERVE, MEMORY = 1_500_000_000, 12 * GIB


def told(asked: Question) -> tuple[ModelShape, Hardware, Question]:
    return load_model(asked.shape), load_hardware(asked.hardware), asked


def qwen(**more: Any) -> tuple[ModelShape, Hardware, Question]:
    return told(Question("qwen3-30b-a3b", gpu="rtx-3060", ram="ddr4-3200", **more))


def test_the_least_need_is_every_tokens_weights_the_cache_of_keys_and_values_and_the_reserve() -> None:
    shape, hardware, asked = qwen(weights="bf16", context=1000, generated=24, batch=2)
    weights = 2 * (48 * (18_874_368 + 2048 * 128) + 2 * 151_936 * 2048)
    fixed = weights + 2 * 1024 * (48 * 1024 * 2) + RESERVE
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    need = need_of(shape, hardware, asked)
    assert (need.fixed, need.host) == (fixed, experts - (MEMORY - fixed) + HOST_RESERVE_BYTES)


def test_every_expert_may_be_on_the_gpu() -> None:
    assert all_on_gpu(*told(Question("qwen3-30b-a3b", gpu="rtx-4090", ram="ddr5-5600")))
    assert not all_on_gpu(*told(Question("qwen3-30b-a3b", gpu="rtx-4080", ram="ddr5-5600")))


def test_a_context_that_the_gpu_cannot_hold_is_refused_with_the_longest_that_it_can() -> None:
    with pytest.raises(FitError, match=r"RTX 3060 12GB.*: 7\.7 GB are missing; .*a context of ") as error:
        check_fits(*qwen(context=184_000))
    longest = int(str(error.value).rpartition("a context of ")[2].split()[0].replace(",", ""))
    check_fits(*qwen(context=longest))
    with pytest.raises(FitError):
        check_fits(*qwen(context=longest + 256))


def test_weights_that_the_host_cannot_hold_are_refused_with_those_that_it_can() -> None:
    with pytest.raises(FitError, match=r"17\.2 GB of host memory: .* GB are missing; these weights fit: ") as error:
        check_fits(*qwen(weights="bf16", ram_gb=16))
    fitting = str(error.value).partition("these weights fit: ")[2].partition(";")[0].split(", ")
    assert "q4_k_m" in fitting
    assert "q8_0" not in fitting
    for name in fitting:
        check_fits(*qwen(weights=name, ram_gb=16))


def test_what_no_weights_help_says_so() -> None:
    with pytest.raises(FitError, match="no weights and no shorter context fit"):
        check_fits(*told(Question("qwen3-235b-a22b", weights="q2_k", gpu="rtx-3060", ram="ddr4-3200", ram_gb=8)))


def test_the_missing_gb_are_those_that_would_do() -> None:
    shape, hardware, asked = qwen(weights="bf16")
    need = need_of(shape, hardware, asked)
    assert need.missing(hardware.gpu.memory_bytes, need.host) == (need.fixed - MEMORY, 0)
    assert need.missing(need.fixed - 7, need.host - 9) == (7, 9)
    assert need.missing(need.fixed, None) == (0, 0)
