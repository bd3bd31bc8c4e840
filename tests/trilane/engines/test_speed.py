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
from trilane.engines.accuracy.errors import Regime, regime_error
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
    assert one.error == regime_error(regime, load_fitted(one.engine))


def test_without_a_gpu_there_is_the_engines_answer_alone() -> None:
    found = fit(Question("deepseek-v2-lite:4", gpu="none", ram="ddr5-5600", cpu="ryzen-9-7950x", prompt_tokens=64))
    assert found.policies is None
    assert found.engine is not None
    assert {gain.part for gain in found.engine.gains} == {"DRAM", "CPU reads", "CPU cores"}
    assert " -ngl 0 " in found.engine.command
    assert "gpu_experts" not in found.engine.decode_ms
    with pytest.raises(FitError, match=r"does not run on none\+ddr5-5600\+64gb: with all experts it .* GB of memory"):
        fit(Question("deepseek-v3", gpu="none", ram="ddr5-5600", ram_gb=64))


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
