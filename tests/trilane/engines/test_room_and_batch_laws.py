"""Laws of random questions: none is refused where a split has room, and none answered without; a step of n sequences
takes between 1 and n times that of one. `make test` asks a sample, the deep profile all of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sim.costs.engine import FittedEngine, LayerKind
from sim.costs.processors import AttentionWork, CpuProcessor, GpuProcessor
from sim.machine.hardware import Hardware, load_hardware
from tests.kit.depth import DEEP
from tests.kit.random_questions import random_questions
from traces.models.shape import ModelShape
from trilane.common.units import GIB
from trilane.engines.load_memory import LoadSetting, load_memory
from trilane.engines.memory import HOST_RESERVE_BYTES, SplitMemory, Splitter, host_memory_of
from trilane.engines.question import Question, engine_of
from trilane.engines.shortage import NoRoomError
from trilane.engines.split_speed import StaticSplit, decode_time

SAMPLE, ALL = 400, 10_000
COUNT = ALL if DEEP else SAMPLE


def told(question: Question) -> tuple[ModelShape, Hardware, FittedEngine]:
    hardware = load_hardware(question.hardware)
    return question.model_shape, hardware, engine_of(question, hardware)


def report(law: str, counts: Counter[str]) -> None:
    print(f"\n{law}: {counts.total():,} questions, {', '.join(f'{n:,} {what}' for what, n in sorted(counts.items()))}")


# --- room -------------------------------------------------------------------------------------------------------------


def some_split_has_room(question: Question) -> bool:
    """True if some number of layers, or of experts, on the CPU leaves room: all are asked of ``load_memory`` itself."""
    shape, hardware, engine = told(question)
    piece = question.ubatch or engine.prompt.piece_tokens.value
    optional = engine.dialect == "sglang" and not hardware.one_memory  # without room for copies nothing is copied
    copied: Any = "nothing" if optional or engine.prompt.experts.value == "computed" else engine.copies_at_once
    by_layer, layers = shape.expert_bytes_by_layer, shape.moe_layers
    some = range(layers + 1) if engine.splits == "layers" else (0, layers)  # others leave a part of every layer
    for on_cpu in (0,) if hardware.one_memory else some:
        setting = LoadSetting(
            question.batch * question.tokens, question.batch, piece, cpu_layers=on_cpu, gpu=not hardware.cpu_only,
            copied=copied,
        )
        load = load_memory(shape, setting)
        gpu, host = load.gpu_bytes, load.host_weights_bytes + load.host_compute_bytes
        if fits(question, hardware, gpu, host):
            return True
    if hardware.one_memory or engine.splits == "layers":
        return False
    return any(  # of every layer some experts, with the buffers of all of them
        fits(question, hardware, gpu + count * sum(by_layer), host - count * sum(by_layer))
        for count in range(shape.experts)
    )


def fits(question: Question, hardware: Hardware, gpu: int, host: int) -> bool:
    reserve, ram = hardware.gpu.reserve_bytes, host_memory_of(question, hardware)
    if hardware.one_memory:
        return gpu + host + reserve <= hardware.gpu.memory_bytes
    return gpu + reserve <= hardware.gpu.memory_bytes and (ram is None or host + HOST_RESERVE_BYTES <= ram)


def is_answered(splits: Splitter) -> bool:
    try:
        return bool(splits.best())
    except NoRoomError:
        return False


def with_tight_host(question: Question, less: int) -> Question:
    """The question with the host's memory that its split just needs, by its own account, and ``less`` GiB fewer."""
    shape, hardware, engine = told(question)
    splits = Splitter(replace(question, ram_gb=None), shape, hardware, engine)
    if hardware.one_memory or not is_answered(splits):
        return question
    needed = sum(splits.memory(splits.best()).host_parts.values())
    return replace(question, ram_gb=max(-(-needed // GIB) - less, 1))


def wrong_about_room(count: int, seed: int = 31) -> list[Question]:
    """Questions that are refused although there is room, or answered without."""
    counts: Counter[str] = Counter()
    wrong = []
    for place, drawn in enumerate(random_questions(seed, count)):
        question = with_tight_host(drawn, place % 4 - 1) if place % 4 else drawn
        answered = is_answered(Splitter(question, *told(question)))
        counts["answered" if answered else "refused"] += 1
        if answered != some_split_has_room(question):
            wrong.append(question)
    report("room", counts)
    return wrong


def test_no_question_is_refused_where_a_split_has_room_nor_answered_without() -> None:
    assert wrong_about_room(COUNT) == []


@pytest.mark.parametrize("part", ["every_token_bytes", "host_table_bytes", "compute_bytes"])
def test_a_twin_that_counts_a_part_twice_or_not_at_all_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Splitter.memory_of

    def broken(self: Splitter, cpu_layers: int, gpu_experts: int) -> SplitMemory:
        memory = own(self, cpu_layers, gpu_experts)
        wrong = memory.every_token_bytes + self.shape.embedding_bytes if part == "every_token_bytes" else 0
        return replace(memory, **{part: wrong})

    monkeypatch.setattr(Splitter, "memory_of", broken)
    assert wrong_about_room(SAMPLE)


# --- batches ----------------------------------------------------------------------------------------------------------


def out_of_bounds(count: int, **fixed: Any) -> list[tuple[Question, float, int]]:
    """Questions, with the time of a step over that of one sequence, and the number of sequences, where it breaks the
    law. Room is not asked for."""
    draw, counts, found = random.Random(32), Counter[str](), []
    for question in random_questions(32, count, **fixed):
        shape, hardware, engine = told(question)
        split = StaticSplit(0 if hardware.one_memory else draw.choice([0, shape.moe_layers // 2, shape.moe_layers]))
        split, n = replace(split, threads=question.threads), draw.choice([2, 3, 4, 8, 32])
        one, many = (decode_time(shape, hardware, engine, split, question.tokens, k).total_ns for k in (1, n))
        counts["CPU alone" if hardware.cpu_only else "one memory" if hardware.one_memory else "CPU and GPU"
               if split.cpu_layers else "GPU"] += 1
        if not one <= many <= n * one + shape.layers:  # times are whole ns
            found.append((question, many / one, n))
    report("batches", counts)
    return found


def test_a_step_of_n_sequences_takes_between_1_and_n_times_that_of_one() -> None:
    assert out_of_bounds(COUNT) == []


@pytest.mark.parametrize(("processor", "fixed"), [
    (CpuProcessor, {"gpu": "none", "ram": "ddr4-3200", "cpu": None, "kv": "q4_0"}),
    (GpuProcessor, {"gpu": "p100", "ram": "ddr4-3200", "cpu": None, "model": "deepseek-v3", "weights": "q4_k_m"}),
])
def test_a_twin_with_products_free_for_one_row_of_a_step_is_found(
    processor: type[CpuProcessor | GpuProcessor], fixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own: Callable[..., float] = processor.attention_ns

    def broken(self: CpuProcessor, work: AttentionWork, kind: LayerKind, rows: int, sequences: int) -> float:
        return own(self, work, kind, rows, 1) if rows > 1 else 0.0

    assert out_of_bounds(SAMPLE // 4, **fixed) == []
    monkeypatch.setattr(processor, "attention_ns", broken)
    assert out_of_bounds(SAMPLE // 4, **fixed)
