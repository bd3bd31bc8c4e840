"""vLLM: nothing is computed on the CPU, a share of the card is its own, and rows of other people judge it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.costs.engine import load_fitted
from sim.machine.cards import load_machine
from traces.models.catalogue import load_model
from trilane.common.units import GIB
from trilane.engines.accuracy.apart import VLLM
from trilane.engines.accuracy.measured_rows import predict, read_rows
from trilane.engines.question import FitError, Question, fitted_engines
from trilane.engines.shortage import NoRoomError
from trilane.engines.speed import EngineSpeed, engine_answer
from trilane.engines.split_speed import StaticSplit, decode_time, prompt_time
from trilane.engines.vllm_memory import PROGRAM_BYTES

CARD = Question("qwen3-30b-a3b", gpu="rtx-3090", ram="ddr4-3200", engine="vllm")
OFFLOADED = Question("gpt-oss-120b", gpu="rtx-5090", ram="ddr5-5600", ram_gb=96, engine="vllm")


def speed_of(question: Question) -> EngineSpeed:
    return EngineSpeed.asked(question, question.model_shape, question.load_machine())


def test_a_step_is_the_bytes_of_its_weights_and_the_fixed_times_of_its_layers() -> None:
    """Qwen3-30B-A3B in BF16 at an empty cache on a card as quick as the one for which they are stated."""
    engine, card = load_fitted("vllm"), load_machine("rtx-4090+ddr5-5600")
    hardware = card.with_numbers({"gpu.memory_bytes": 100e9, "gpu.integer_ops_per_s": 6.6e14})
    model = load_model("qwen3-30b-a3b")
    weights = 48 * (8 * model.expert_bytes_by_layer[0]) + model.non_expert_bytes - model.embedding_bytes
    by_hand_ms = weights / (0.9 * card.gpu.bandwidth_bytes_per_s) * 1e3 + 48 * 0.060 + 0.3
    time = decode_time(model, hardware, engine, StaticSplit(0), 1)
    assert time.total_ns / 1e6 == pytest.approx(by_hand_ms, rel=0.01)
    assert time.cpu_experts_ns == time.handing_over_ns == 0


def test_products_are_at_the_16_bit_rate() -> None:
    """A GeForce card has an 8-bit rate of four times that, a workstation's one of twice: only the first counts here."""
    engine, model = load_fitted("vllm"), load_model("qwen3-30b-a3b")
    card = load_machine("rtx-5090+ddr5-5600")
    quicker = card.with_numbers({"gpu.flops_per_s": 2 * card.gpu.flops_per_s})
    times = [prompt_time(model, one, engine, StaticSplit(0), 8192).gpu_experts_ns for one in (card, quicker)]
    assert 0.45 < times[1] / times[0] < 0.65


def test_weights_keys_and_values_have_nine_tenths_of_a_card() -> None:
    memory = speed_of(CARD).splitter.memory(StaticSplit(0))
    assert memory.reserve_bytes == round(0.1 * 24 * GIB) + PROGRAM_BYTES
    assert memory.host_table_bytes == 0
    model = CARD.model_shape
    assert memory.every_token_bytes + memory.experts_bytes == model.non_expert_bytes + model.routed_bytes


def test_it_takes_larger_pieces_on_large_cards() -> None:
    large = replace(CARD, gpu="rtx-pro-6000-blackwell")
    assert [speed_of(one).splitter.piece_tokens for one in (CARD, large, replace(large, gpu="a100-80gb-sxm"))] == [
        2048, 8192, 2048,
    ]


def test_offloaded_experts_are_read_over_the_link_as_they_are_chosen() -> None:
    speed = speed_of(OFFLOADED)
    split, shape, link = speed.split, speed.shape, speed.hardware.link
    assert split.cpu_layers > 0
    read = split.cpu_layers * shape.top_k * shape.expert_bytes_by_layer[0]
    decode = speed.decode
    assert decode.copies_ns > read / link.h2d_bytes_per_s * 1e9
    assert decode.copies_ns < 1.5 * read / link.h2d_bytes_per_s * 1e9
    assert decode.cpu_experts_ns == 0
    quicker = replace(OFFLOADED, pcie="5x16")
    assert speed_of(quicker).decode.copies_ns == decode.copies_ns  # as a 5090 is by itself
    assert speed_of(replace(OFFLOADED, pcie="4x16")).decode.copies_ns > 1.7 * decode.copies_ns


def test_the_line_to_paste() -> None:
    assert " ".join(speed_of(replace(CARD, batch=2)).words) == (
        "vllm serve qwen3-30b-a3b-awq --max-model-len 4352 --max-num-seqs 2 --max-num-batched-tokens 2048 "
        "--gpu-memory-utilization 0.9"
    )
    offloaded = " ".join(speed_of(OFFLOADED).words)
    assert offloaded.startswith("vllm serve gpt-oss-120b --max-model-len 4352 ")
    assert offloaded.endswith(" --cpu-offload-params experts")


def test_its_own_weights_are_those_of_no_gguf_file() -> None:
    assert CARD.shape == "qwen3-30b-a3b@awq"
    assert OFFLOADED.shape == "gpt-oss-120b"
    assert replace(CARD, engine="ktransformers").shape == "qwen3-30b-a3b@q4_k_m"


@pytest.mark.parametrize(("changes", "words"), [
    ({"gpu": "radeon-ai-pro-r9700"}, "vllm has no numbers for AMD's GPUs; use llama.cpp-rocm or llama.cpp-vulkan"),
    ({"gpu": "none"}, "vllm: expected a machine with a GPU"),
    ({"gpu": "p40"}, "vllm: expected GPUs of compute capability 7.0 or more, got Tesla P40; use llama.cpp"),
    ({"weights": "q4_k_m"}, "vllm does not read weights in q4_k_m"),
    ({"kv": "q8_0"}, "kv q8_0: expected f16 with vllm"),
])
def test_it_says_what_it_does_not_take(changes: dict[str, str], words: str) -> None:
    question = replace(CARD, **changes)
    with pytest.raises(FitError, match=words):
        engine_answer(question, question.model_shape, question.load_machine())


def test_what_does_not_fit_is_refused_with_ways() -> None:
    question = Question("glm-4.5-air", weights="bf16", gpu="rtx-3090", ram="ddr4-3200", ram_gb=64, engine="vllm")
    with pytest.raises(NoRoomError, match="GB of host memory"):
        engine_answer(question, question.model_shape, question.load_machine())


def test_it_answers_where_it_is_named_alone() -> None:
    assert "vllm" not in fitted_engines()
    answer = engine_answer(CARD, CARD.model_shape, CARD.load_machine())
    assert answer.engine == "vllm"
    assert answer.error is None


def test_every_row_is_asked_and_has_its_source() -> None:
    rows = read_rows(VLLM)
    assert {row.engine for row in rows} == {"vllm"}
    assert all(row.source and predict(row).decode_tokens_per_s for row in rows)
    late = [row for row in rows if row.scored and row.date >= "2026" and row.depth_tokens < 32768 and not row.put_in]
    errors = {row.id: (predict(row).decode_tokens_per_s or 0) / (row.decode_tokens_per_s or 1) - 1 for row in late}
    assert len(errors) == 6
    assert max(map(abs, errors.values())) < 0.15  # docs/notes/vllm.md
