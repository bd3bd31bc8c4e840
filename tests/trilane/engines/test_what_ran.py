"""Questions of people whose programs ran: what is really allocated has room, and no more than that."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.questions import answered, splitter
from traces.models.catalogue import load_model
from trilane.engines.memory import MARGIN_BYTES
from trilane.engines.shortage import NoRoomError

GEMMA = {"model": "gemma-4-26b-a4b", "weights": "q4_0", "gpu": "rtx-4060", "ram": "ddr5-5600", "engine": "llama.cpp",
         "prompt_tokens": 512, "generated": 128}
SERVER = {"model": "deepseek-v3", "ram": "ddr4-3200-ecc", "cpu": "epyc-7763", "sockets": 2, "engine": "ktransformers",
          "generated": 128}


def layer_bytes(weights: str) -> int:
    """All experts of a layer."""
    shape = load_model(f"deepseek-v3@{weights}")
    return max(shape.expert_bytes_by_layer) * shape.experts


def test_a_split_that_is_named_needs_room_for_what_is_allocated_and_a_chosen_one_a_margin() -> None:
    named, chosen = answered(**GEMMA, n_cpu_moe=17).memory, answered(**GEMMA).memory
    assert chosen.reserve_bytes - named.reserve_bytes == MARGIN_BYTES
    assert 0 < named.gpu_bytes - sum(named.gpu_parts.values()) < MARGIN_BYTES
    assert answered(**GEMMA).cpu_layers > 17
    with pytest.raises(NoRoomError, match="with the experts of 15 layers on the CPU"):
        answered(**GEMMA, n_cpu_moe=15)


@pytest.mark.parametrize(("weights", "gpu"), [("q4_k_m", "rtx-4060-ti-16gb"), ("bf16", "a100-40gb-pcie")])
def test_prompts_are_computed_where_there_is_no_room_for_the_buffer_of_a_layer(weights: str, gpu: str) -> None:
    found = answered(**SERVER, weights=weights, gpu=gpu, prompt_tokens=8192)
    assert found.memory.compute_bytes < layer_bytes(weights) / 2
    assert found.prompt_ms["copies"] == 0
    assert found.prompt_ms["cpu_experts"] > 0


def test_prompts_are_copied_layer_by_layer_where_there_is_room() -> None:
    found = answered(**SERVER, weights="q4_k_m", gpu="a100-40gb-pcie", prompt_tokens=8192)
    assert found.memory.compute_bytes > layer_bytes("q4_k_m")
    assert found.prompt_ms["copies"] > 0


@pytest.mark.parametrize(("prompt_tokens", "copied"), [(399, False), (400, True)])
def test_short_prompts_are_computed_without_the_buffer(prompt_tokens: int, copied: bool) -> None:
    found = answered(**SERVER, weights="q4_k_m", gpu="a100-80gb-sxm", prompt_tokens=prompt_tokens)
    assert (found.memory.compute_bytes > layer_bytes("q4_k_m")) == copied
    assert (found.prompt_ms["copies"] > 0) == copied


def test_llama_cpp_has_its_buffers_whatever_the_prompt() -> None:
    asked: dict[str, Any] = {**GEMMA, "n_cpu_moe": 20}
    short, long = (splitter(**{**asked, "prompt_tokens": tokens, "generated": 2048 - tokens}) for tokens in (8, 1024))
    assert short.memory(short.best()).compute_bytes == long.memory(long.best()).compute_bytes
