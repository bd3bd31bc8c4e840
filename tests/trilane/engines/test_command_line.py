"""Command lines: what each engine and build is told, and how it counts layers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sim.costs.engine import load_engine
from sim.machine.hardware import load_hardware
from tests.kit.questions import QWEN, answered
from traces.models.catalogue import load_model
from trilane.engines.command_line import command_words, cpu_layers_of
from trilane.engines.question import Question
from trilane.engines.split_speed import StaticSplit


def words(engine: str, split: StaticSplit, **asked: Any) -> list[str]:
    question = Question(**{**QWEN, **asked})
    hardware = load_hardware(question.hardware)
    return command_words(question, question.model_shape, load_engine(engine), split, hardware)


def test_the_command_line_has_what_the_answer_rests_on() -> None:
    one = answered(**QWEN, threads=8, ubatch=4096, kv="q8_0")
    assert one.command == (
        f"llama-server -m qwen3-30b-a3b-q4_k_m.gguf -ngl 99 --n-cpu-moe {one.cpu_layers} -c 4352 -fa on "
        f"-b 4096 -ub 4096 -t 8 -ctk q8_0 -ctv q8_0"
    )
    assert answered(**{**QWEN, "gpu": "rtx-5090"}).command == (
        "llama-server -m qwen3-30b-a3b-q4_k_m.gguf -ngl 99 -c 4352 -fa on"
    )


def test_llama_cpp_counts_the_dense_layers_too() -> None:
    one = answered(model="deepseek-v2-lite", gpu="rtx-3060", ram="ddr4-3200", weights="bf16")
    sizes = load_model("deepseek-v2-lite@bf16")
    on_cpu = round(one.memory.host_bytes / sizes.expert_bytes_by_layer[0] / sizes.experts)
    assert one.cpu_layers == on_cpu + 1
    assert answered(model="deepseek-v2-lite", gpu="rtx-3060", ram="ddr4-3200", weights="bf16",
                    n_cpu_moe=one.cpu_layers).tpot_ms == one.tpot_ms


@pytest.mark.parametrize(("model", "first", "last"), [
    ("llama-4-maverick", 1, 47), ("nemotron-3-nano-30b", 1, 51), ("deepseek-v2-lite", 1, 26), ("olmoe-1b-7b", 0, 15),
])
def test_llama_cpp_counts_blocks_between_those_with_experts(model: str, first: int, last: int) -> None:
    """Every second layer of Llama-4-Maverick has experts, and 23 of 52 blocks of Nemotron-3-Nano."""
    shape = load_model(f"{model}@q2_k")
    assert cpu_layers_of(shape, 1) == first + 1
    assert cpu_layers_of(shape, shape.moe_layers) == last + 1
    for given in (0, first + 1, last, last + 1):
        one = answered(model=model, gpu="h200-sxm", ram="ddr5-5600", weights="q2_k", n_cpu_moe=given)
        on_cpu = sum(block < given for block in shape.expert_blocks)
        assert one.memory.host_bytes == on_cpu * shape.experts * shape.expert_bytes_by_layer[0]


def test_ktransformers_keeps_some_experts_of_every_layer_and_is_told_the_format() -> None:
    one = answered(**QWEN, engine="ktransformers")
    assert 0 < one.gpu_experts < 128
    assert one.command == (
        f"python -m sglang.launch_server --model qwen3-30b-a3b --kt-weight-path qwen3-30b-a3b-q4_k_m "
        f"--kt-method LLAMAFILE --kt-cpuinfer 16 --kt-threadpool-count 1 --kt-num-gpu-experts {one.gpu_experts} "
        f"--context-length 4352 --chunked-prefill-size 2048"
    )
    own = words("ktransformers", StaticSplit(48, 3), weights="bf16", threads=8)
    assert {"--kt-method BF16", "--kt-cpuinfer 8", "--model qwen3-30b-a3b-bf16"} <= set(own)
    assert "--kt-threadpool-count 2" in words(
        "ktransformers", StaticSplit(48, 3), ram="ddr5-4800-ecc", cpu="epyc-9354", cores=None, sockets=2
    )


@pytest.mark.parametrize("layers", [1, 9, 10, 11, 48])
def test_builds_of_early_2025_have_no_n_cpu_moe(layers: int) -> None:
    """The pattern takes the experts of these layers and no others."""
    own = words("llama.cpp-2025", StaticSplit(layers))
    [option] = [word for word in own if word.startswith("-ot ")]
    pattern, _, target = option.removeprefix("-ot '").removesuffix("'").partition("=")
    taken = [layer for layer in range(128) if re.search(pattern, f"blk.{layer}.ffn_up_exps.weight")]
    assert (taken, target) == (list(range(layers)), "CPU")
    assert not re.search(pattern, "blk.0.ffn_up_shexp.weight")
    assert "-fa" in own
    assert not any(word.startswith("--n-cpu-moe") for word in own)


def test_later_builds_take_what_todays_do() -> None:
    assert words("llama.cpp-2026-02", StaticSplit(5)) == words("llama.cpp", StaticSplit(5))


def test_ik_llama_cpp_fuses_products_by_itself_since_november_2025() -> None:
    """And its latent attention was to be named before."""
    assert words("ik_llama.cpp", StaticSplit(5)) == words("llama.cpp", StaticSplit(5))
    early = words("ik_llama.cpp-2025", StaticSplit(5), model="deepseek-v2-lite")
    assert early[-3:] == ["-fa", "-fmoe", "-mla 3"]
    assert "-mla 3" not in words("ik_llama.cpp-2025", StaticSplit(5))


def test_ik_llama_cpp_repacks_weights_where_the_cpu_computes_everything() -> None:
    alone: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "none", "ram": "ddr5-5600"}
    one = answered(**alone, engine="ik_llama.cpp")
    assert one.command.endswith(" -rtr")
    assert one.ttft_ms < 0.5 * answered(**alone, engine="llama.cpp").ttft_ms
    assert "-rtr" not in answered(**QWEN, engine="ik_llama.cpp").command
