"""The answer for an engine: its parts, gains and errors, and larger pieces of a prompt."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.costs.engine import load_engine, load_fitted
from sim.machine.hardware import load_hardware, write_hardware
from tests.kit.hand_measured import toy_machine, toy_model
from tests.kit.questions import GEMMA, QWEN, SMALL, answered
from traces.models.catalogue import load_model
from trilane.common.units import GIB
from trilane.engines.accuracy.errors import Regime, error_to_expect
from trilane.engines.command_line import command_words, cpu_layers_of
from trilane.engines.question import FitError, Question
from trilane.engines.split_speed import StaticSplit, decode_time, prompt_time
from trilane.fit.fit import fit


def test_times_are_those_of_the_closed_form_in_the_middle_of_the_answer() -> None:
    one = answered(**QWEN, threads=8, ubatch=1024, generated=512)
    shape, hardware = load_model("qwen3-30b-a3b@q4_k_m"), load_hardware(Question(**QWEN).hardware)
    split, engine = StaticSplit(one.cpu_layers, threads=8, piece_tokens=1024), load_engine("llama.cpp")
    decode = decode_time(shape, hardware, engine, split, 4096 + 256)
    assert one.tpot_ms == decode.total_ns / 1e6 == pytest.approx(sum(one.decode_ms.values()))
    assert one.ttft_ms == prompt_time(shape, hardware, engine, split, 4096).total_ns / 1e6
    assert (one.piece_tokens, one.pieces) == (1024, 4)


def test_more_layers_on_the_cpu_and_fewer_threads_are_slower() -> None:
    assert answered(**QWEN, n_cpu_moe=30).tpot_ms > answered(**QWEN).tpot_ms
    assert answered(**QWEN, threads=1).tpot_ms > answered(**QWEN, threads=8).tpot_ms


def test_named_policies_do_not_change_the_engines_answer() -> None:
    """Its first token is that of experts copied to the GPU, whichever llama.cpp among the policies is named."""
    named = fit(Question(**SMALL, policies=("llama.cpp",))).engine
    assert named is not None
    assert named == fit(Question(**SMALL, policies=("on-demand",))).engine


def test_several_sequences_share_the_reading_of_weights() -> None:
    one, four = answered(**QWEN), answered(**QWEN, batch=4)
    assert one.tpot_ms < four.tpot_ms < 4 * one.tpot_ms
    assert (four.pieces, four.ttft_ms > 3.9 * one.ttft_ms) == (4 * one.pieces, True)
    assert one.error is not None
    assert four.error is None  # others measured one sequence at a time


def test_a_profile_has_no_other_engine(tmp_path: Path) -> None:
    mini = toy_model(load_model("mini-moe:2"), shared=None, dense_ffn=None, dense_launch=None)
    write_hardware(toy_machine(models={"mini-moe": mini}), tmp_path / "lanes.yaml")
    asked = Question("mini-moe:2", machine=str(tmp_path / "lanes.yaml"), prompt_tokens=8, generated=4)
    found = fit(asked)
    assert (found.engine, found.engine_refused) == (None, None)
    with pytest.raises(FitError, match="is a profile, whose times are those of the engine that was measured"):
        fit(replace(asked, threads=2))


@pytest.mark.parametrize(("asked", "regime"), [
    (QWEN, "mixed"),
    ({**QWEN, "gpu": "rtx-5090"}, "all GPU"),
    ({**QWEN, "engine": "llama.cpp-vulkan"}, "Vulkan"),
    ({"model": "qwen3-30b-a3b", "gpu": "none", "ram": "ddr5-5600"}, "CPU only"),
])
def test_an_answer_names_the_error_of_its_regime(asked: dict[str, Any], regime: Regime) -> None:
    one = answered(**asked)
    assert one.regime == regime
    question = Question(**{"prompt_tokens": 4096, **asked})
    hardware = load_hardware(question.hardware)
    assert one.error == error_to_expect(question.model_shape, hardware, regime, load_fitted(one.engine))


def test_without_a_gpu_there_is_the_engines_answer_alone() -> None:
    found = fit(Question("deepseek-v2-lite:4", gpu="none", ram="ddr5-5600", cpu="ryzen-9-7950x", prompt_tokens=64))
    assert found.policies is None
    assert found.engine is not None
    assert {gain.part for gain in found.engine.gains} == {"DRAM", "CPU reads", "CPU cores"}
    assert " -ngl 0 " in found.engine.command
    assert "gpu_experts" not in found.engine.decode_ms
    with pytest.raises(FitError, match=r"deepseek-v3.*GB of memory .*the machine has 64 GiB.*\nit runs with --ram-gb"):
        fit(Question("deepseek-v3", gpu="none", ram="ddr5-5600-ecc", ram_gb=64))


def test_one_memory_holds_everything() -> None:
    one = answered(model="gpt-oss-120b", gpu="gb10")
    assert (one.cpu_layers, one.memory.host_bytes) == (0, 0)
    assert one.memory.gpu_bytes == 128 * GIB


def test_faster_memory_gives_nothing_where_the_cpu_reads_all_it_can() -> None:
    """One chiplet reads 64 GB/s at most; dual-channel DDR5-6000 gives 79."""
    chiplet = {**QWEN, "ram": "ddr5-6000", "cpu": "ryzen-7-7800x3d", "cores": 8}
    gains = {gain.part: gain.tpot for gain in answered(**chiplet).gains}
    assert gains["DRAM"] == 0
    assert gains["CPU reads"] > 0
    assert "CPU reads" not in {gain.part for gain in answered(**QWEN).gains}


def test_a_better_part_is_never_slower_and_the_first_gain_is_the_limit() -> None:
    for asked in (QWEN, {**QWEN, "weights": "q8_0"}, {**QWEN, "gpu": "rtx-5090"}, GEMMA):
        one = answered(**asked)
        assert all(gain.tpot >= 0 and gain.ttft >= 0 for gain in one.gains), asked
        assert one.limit in (one.gains[0].part, None)
    gains = {gain.part: gain for gain in answered(**QWEN).gains}
    assert gains["GPU memory"].tpot > gains["DRAM"].tpot > 0
    assert gains["PCIe"].ttft > gains["PCIe"].tpot == 0


def test_larger_pieces_are_told_where_copies_of_experts_rule() -> None:
    """Most experts of DeepSeek-V3 are in the host's memory, and are copied for each piece."""
    server = {"model": "deepseek-v3", "gpu": "rtx-4090", "ram": "ddr5-4800-ecc", "cpu": "epyc-9354"}
    one = answered(**server)
    larger = one.larger_pieces
    assert larger is not None
    assert larger.arguments == "-b 4096 -ub 4096"
    assert one.ttft_ms > 6 * larger.ttft_ms
    told = answered(**server, ubatch=4096)
    assert (told.ttft_ms, told.tpot_ms, told.larger_pieces) == (larger.ttft_ms, larger.tpot_ms, None)


def test_larger_pieces_name_the_layers_that_no_longer_fit() -> None:
    larger = answered(**QWEN).larger_pieces
    assert larger is not None
    layers, ubatch = (int(number) for number in re.findall(r"--n-cpu-moe (\d+) .*-ub (\d+)", larger.arguments)[0])
    told = answered(**QWEN, ubatch=ubatch)
    assert told.cpu_layers == layers > answered(**QWEN).cpu_layers
    assert (told.ttft_ms, told.tpot_ms) == (larger.ttft_ms, larger.tpot_ms)


@pytest.mark.parametrize("asked", [
    {**QWEN, "prompt_tokens": 500},
    {**QWEN, "ubatch": 512},
    {"model": "qwen3-30b-a3b", "gpu": "none", "ram": "ddr5-5600"},
    {**QWEN, "generated": 10_000},  # the answer as a whole would end later
])
def test_larger_pieces_are_not_told_where_they_give_little(asked: dict[str, Any]) -> None:
    assert answered(**asked).larger_pieces is None


# --- Command lines ----------------------------------------------------------------------------------------------------


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
    assert " -np 2" in answered(**QWEN, batch=2).command
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
