"""The engine's answer: what the GPU has room for, speeds of a closed form, the command line, gains of better parts."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.costs.engine import load_engine
from sim.costs.split_speed import StaticSplit, decode_time, prompt_time
from sim.machine.hardware import load_hardware, write_hardware
from sim.machine.units import GIB
from tests.kit.hand_measured import toy_machine, toy_model
from traces.models.catalogue import load_model, model_names
from traces.models.names import parted
from trilane.study.accuracy.regime_errors import regime_error
from trilane.study.accuracy.regimes import Regime
from trilane.study.fit.command_line import command_words, cpu_layers_of
from trilane.study.fit.engine_answer import EngineAnswer, engine_answer
from trilane.study.fit.engine_choice import engine_of, reads
from trilane.study.fit.fit import fit, with_longest_context
from trilane.study.fit.question import FitError, Question
from trilane.study.fit.split_memory import Splitter

QWEN: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "rtx-4080", "ram": "ddr5-5600", "cores": 16}
GEMMA: dict[str, Any] = {"model": "gemma-4-26b-a4b", "gpu": "rtx-3060", "ram": "ddr4-3200"}
SMALL: dict[str, Any] = {"model": "deepseek-v2-lite:4", "gpu": "rtx-3060", "ram": "ddr4-3200", "context": 64}


@cache
def answered(**asked: Any) -> EngineAnswer:
    question = Question(**asked)
    return engine_answer(question, question.model_shape, load_hardware(question.hardware))


def splitter(**asked: Any) -> Splitter:
    question = Question(**asked)
    hardware = load_hardware(question.hardware)
    engine = engine_of(question, hardware)
    return Splitter(question, question.model_shape, hardware, engine)


# --- memory -----------------------------------------------------------------------------------------------------------


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
    memory = splitter(model=model, gpu="rtx-5090", ram="ddr5-5600", context=4096).memory(StaticSplit(40))
    ours = memory.every_token_bytes + memory.kv_bytes + memory.compute_bytes + memory.experts_bytes
    logged = ours - memory.compute_bytes + mib * 2**20
    assert 0 <= ours / logged - 1 < 0.03


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        ({"model": "qwen3.5-35b-a3b", "gpu": "rtx-5060-ti-16gb", "ram": "ddr5-5600", "context": 16_000}, 14),
        ({"model": "qwen3.6-35b-a3b", "weights": "iq4_xs", "gpu": "rtx-3060", "ram": "ddr4-3200", "context": 1470}, 18),
        ({"model": "qwen3-30b-a3b", "gpu": "rtx-5070", "ram": "ddr5-5600", "context": 512}, 22),
        ({"model": "gpt-oss-120b", "gpu": "rtx-3090", "ram": "ddr4-3200", "context": 1400}, 27),
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
    layer, inputs = 8 * shape.expert_bytes_of(0), 512 * (4 * 4096 * 4 + 4352 * 2)
    assert own.memory(StaticSplit(1)).compute_bytes == layer // 3 + 512 * 4 * 2 * 2 * 14_336 + inputs
    other = splitter(**{**QWEN, "model": "mixtral-8x7b", "engine": "ik_llama.cpp"})
    piece = other.piece_tokens
    expected = layer + piece * (4 * 2 * 2 * 14_336 + 4 * 4096 * 4 + 4352 * 2)
    assert other.memory(StaticSplit(1)).compute_bytes == expected


def test_larger_pieces_have_more_room() -> None:
    larger = splitter(**QWEN, ubatch=2048).memory(StaticSplit(0))
    assert larger.compute_bytes == 4 * splitter(**QWEN).memory(StaticSplit(0)).compute_bytes
    assert answered(**QWEN, ubatch=4096).cpu_layers > answered(**QWEN).cpu_layers


def test_a_sliding_window_and_a_quantised_cache_leave_room_for_experts() -> None:
    """gemma-4: 25 of 30 layers keep 1,024 tokens."""
    one = answered(**GEMMA, context=32_768)
    assert one.memory.kv_bytes / 1e9 < 1.0
    assert answered(**GEMMA, context=131_072, kv="q4_0").cpu_layers < answered(**GEMMA, context=131_072).cpu_layers


def test_what_leaves_no_room_is_refused_with_what_is_missing() -> None:
    with pytest.raises(FitError, match=r"llama.cpp with the experts of 2 layers on the CPU needs .* GB are missing"):
        answered(**QWEN, n_cpu_moe=2)
    with pytest.raises(FitError, match=r"llama.cpp: host memory is short: .* GiB would do"):
        answered(**{**QWEN, "weights": "bf16"}, ram_gb=32)


def test_the_longest_context_is_no_longer_than_the_model_was_trained_for() -> None:
    asked = with_longest_context(Question("qwen3-30b-a3b", "rtx-4090", "ddr5-5600", generated=200))
    assert asked.context == (40_960 - 200) // 256 * 256
    assert fit(replace(asked, generated=2)).trained_tokens == 40_960


def test_the_longest_context_fits_and_a_longer_one_does_not() -> None:
    own: dict[str, Any] = {"model": "qwen3-30b-a3b-instruct-2507", "gpu": "rtx-3060", "ram": "ddr4-3200", "kv": "q8_0"}
    asked = with_longest_context(Question(**own))
    assert asked.context % 256 == 0
    assert splitter(**own, context=asked.context).best()
    with pytest.raises(FitError):
        splitter(**own, context=asked.context + 512).best()


# --- speeds -----------------------------------------------------------------------------------------------------------


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


def test_the_usual_engine_is_that_of_the_card() -> None:
    names = {gpu: engine_of(Question("qwen3-30b-a3b", gpu=gpu, ram="ddr5-5600"), load_hardware(f"{gpu}+ddr5-5600")).name
             for gpu in ("rtx-4080", "rx-7900-xtx")}  # fmt: skip
    assert names == {"rtx-4080": "llama.cpp", "rx-7900-xtx": "llama.cpp-vulkan"}
    apple = fit(Question("deepseek-v2-lite:4", gpu="apple-m3-max", context=64)).engine
    assert apple is not None
    assert (apple.engine, apple.about) == ("llama.cpp-metal", "builds with Metal, on Apple's chips")


def test_several_sequences_share_the_reading_of_weights() -> None:
    one, four = answered(**QWEN), answered(**QWEN, batch=4)
    assert one.tpot_ms < four.tpot_ms < 4 * one.tpot_ms
    assert (four.pieces, four.ttft_ms > 3.9 * one.ttft_ms) == (4 * one.pieces, True)
    assert one.error is not None
    assert four.error is None  # others measured one sequence at a time


def test_a_profile_has_no_other_engine(tmp_path: Path) -> None:
    mini = toy_model(load_model("mini-moe:2"), shared=None, dense_ffn=None, dense_launch=None)
    write_hardware(toy_machine(models={"mini-moe": mini}), tmp_path / "lanes.yaml")
    asked = Question("mini-moe:2", machine=str(tmp_path / "lanes.yaml"), context=8, generated=4)
    found = fit(asked)
    assert (found.engine, found.engine_refused) == (None, None)
    with pytest.raises(FitError, match="is a profile, whose times are those of the engine that was measured"):
        fit(replace(asked, threads=2))


@pytest.mark.parametrize(
    ("asked", "regime"),
    [
        (QWEN, "mixed"),
        ({**QWEN, "gpu": "rtx-5090"}, "all GPU"),
        ({**QWEN, "engine": "llama.cpp-vulkan"}, "Vulkan"),
        ({"model": "qwen3-30b-a3b", "gpu": "none", "ram": "ddr5-5600"}, "CPU only"),
    ],
)
def test_an_answer_names_the_error_of_its_regime(asked: dict[str, Any], regime: Regime) -> None:
    one = answered(**asked)
    assert one.regime == regime
    assert one.error == regime_error(regime, one.engine)


# --- without a GPU, and with one memory -------------------------------------------------------------------------------


def test_without_a_gpu_there_is_the_engines_answer_alone() -> None:
    found = fit(Question("deepseek-v2-lite:4", gpu="none", ram="ddr5-5600", cpu="ryzen-9-7950x", context=64))
    assert found.policies is None
    assert found.engine is not None
    assert {gain.part for gain in found.engine.gains} == {"DRAM", "CPU cores"}
    assert " -ngl 0 " in found.engine.command
    assert "gpu_experts" not in found.engine.decode_ms
    with pytest.raises(FitError, match=r"does not run on none\+ddr5-5600\+64gb: with all experts it .* GB of memory"):
        fit(Question("deepseek-v3", gpu="none", ram="ddr5-5600", ram_gb=64))


def test_one_memory_holds_everything() -> None:
    one = answered(model="gpt-oss-120b", gpu="gb10")
    assert (one.cpu_layers, one.memory.host_bytes) == (0, 0)
    assert one.memory.gpu_bytes == 128 * GIB


# --- what to type, what to buy ----------------------------------------------------------------------------------------


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
    on_cpu = round(one.memory.host_bytes / sizes.expert_bytes_of(0) / sizes.experts)
    assert one.cpu_layers == on_cpu + 1
    assert answered(model="deepseek-v2-lite", gpu="rtx-3060", ram="ddr4-3200", weights="bf16",
                    n_cpu_moe=one.cpu_layers).tpot_ms == one.tpot_ms  # fmt: skip


@pytest.mark.parametrize(
    ("model", "first", "last"),
    [("llama-4-maverick", 1, 47), ("nemotron-3-nano-30b", 1, 51), ("deepseek-v2-lite", 1, 26), ("olmoe-1b-7b", 0, 15)],
)
def test_llama_cpp_counts_blocks_between_those_with_experts(model: str, first: int, last: int) -> None:
    """Every second layer of Llama-4-Maverick has experts, and 23 of 52 blocks of Nemotron-3-Nano."""
    shape = load_model(f"{model}@q2_k")
    assert cpu_layers_of(shape, 1) == first + 1
    assert cpu_layers_of(shape, shape.moe_layers) == last + 1
    for given in (0, first + 1, last, last + 1):
        one = answered(model=model, gpu="h200-sxm", ram="ddr5-5600", weights="q2_k", n_cpu_moe=given)
        on_cpu = sum(block < given for block in shape.expert_blocks)
        assert one.memory.host_bytes == on_cpu * shape.experts * shape.expert_bytes_of(0)


def words(engine: str, split: StaticSplit, **asked: Any) -> list[str]:
    question = Question(**{**QWEN, **asked})
    hardware = load_hardware(question.hardware)
    return command_words(question, question.model_shape, load_engine(engine), split, hardware)


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


def test_the_answer_says_what_the_engine_runs_on() -> None:
    where = {gpu: answered(**{**QWEN, "gpu": gpu, "engine": engine}).about.split(", ")[-1]
             for gpu, engine in (("rtx-4080", "llama.cpp"), ("rx-7900-xtx", "llama.cpp-rocm"), ("none", "llama.cpp"),
                                 ("rtx-3060", "llama.cpp-vulkan"))}  # fmt: skip
    assert where == {
        "rtx-4080": "CUDA",
        "rx-7900-xtx": "builds with ROCm",
        "none": "the CPU alone",
        "rtx-3060": "builds with Vulkan",
    }


# --- larger pieces of the prompt --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "asked",
    [
        {**QWEN, "context": 500},
        {**QWEN, "ubatch": 512},
        {"model": "qwen3-30b-a3b", "gpu": "none", "ram": "ddr5-5600"},
        {**QWEN, "generated": 10_000},  # the answer as a whole would end later
    ],
)
def test_larger_pieces_are_not_told_where_they_give_little(asked: dict[str, Any]) -> None:
    assert answered(**asked).larger_pieces is None


# --- laws -------------------------------------------------------------------------------------------------------------


def test_a_better_part_is_never_slower_and_the_first_gain_is_the_limit() -> None:
    for asked in (QWEN, {**QWEN, "weights": "q8_0"}, {**QWEN, "gpu": "rtx-5090"}, GEMMA):
        one = answered(**asked)
        assert all(gain.tpot >= 0 and gain.ttft >= 0 for gain in one.gains), asked
        assert one.gains[0].part in one.limited_by
    gains = {gain.part: gain for gain in answered(**QWEN).gains}
    assert gains["GPU memory"].tpot > gains["DRAM"].tpot > 0
    assert gains["PCIe"].ttft > gains["PCIe"].tpot == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpu": "none", "ram": "ddr5-5600", "engine": "llama.cpp-rocm"}, "llama.cpp-rocm: expected a machine with a"),
        ({"gpu": "gb10", "n_cpu_moe": 5}, "all of gb10 is in one memory"),
        ({"gpu": "none", "ram": "ddr5-5600", "n_cpu_moe": 4}, "is in one memory"),
        ({"gpu": "none", "ram": "ddr5-5600", "engine": "ktransformers"}, "expected a machine with a GPU, got none"),
        ({"gpu": "none", "ram": "ddr5-5600", "engine": "llama.cpp-vulkan"}, "with a GPU, got none.*; choose llama.cpp"),
        ({"gpu": "rtx-4080", "ram": "ddr5-5600", "cores": 6, "threads": 13}, "expected at most 12, 2 on each of the 6"),
    ],
)
def test_a_setting_that_the_machine_has_no_use_for_is_refused(asked: dict[str, Any], message: str) -> None:
    question = Question("qwen3-30b-a3b", **asked)
    with pytest.raises(FitError, match=message):
        engine_answer(question, question.model_shape, load_hardware(question.hardware))


RX = {"gpu": "rx-7900-xtx", "ram": "ddr5-5600"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpu": "apple-m3-max", "engine": "ktransformers"}, "on Apple's GPUs; use llama.cpp or llama.cpp-metal"),
        ({**RX, "engine": "ktransformers"}, "on AMD's GPUs; use llama.cpp-rocm or llama.cpp-vulkan"),
        ({**RX, "engine": "llama.cpp"}, "on AMD's GPUs; use llama.cpp-rocm or llama.cpp-vulkan"),
        ({**RX, "engine": "llama.cpp-2025"}, "on AMD's GPUs; use llama.cpp-rocm or llama.cpp-vulkan"),
        ({**QWEN, "engine": "llama.cpp-rocm"}, "on NVIDIA's GPUs; use ik_llama.cpp or ktransformers or llama.cpp or"),
        ({**QWEN, "engine": "llama.cpp-metal"}, "llama.cpp-metal does not run on NVIDIA's GPUs"),
        ({**QWEN, "weights": "awq"}, "llama.cpp does not read weights in awq; ktransformers does"),
        ({**QWEN, "weights": "IQ3_K"}, "llama.cpp does not read weights in iq3_k; ik_llama.cpp does"),
        ({**RX, "weights": "fp8"}, "llama.cpp-vulkan does not read weights in fp8; choose other weights"),
    ],
)
def test_a_card_or_weights_that_the_engine_does_not_take_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(FitError, match=message):
        answered(**{"model": "qwen3-30b-a3b", **asked})


def test_what_a_model_is_published_in_is_read_by_the_usual_engine() -> None:
    llama_cpp = load_engine("llama.cpp")
    for model in model_names():
        weights = parted(Question(model, **RX).shape).weights
        assert weights is None or reads(llama_cpp, weights), model
