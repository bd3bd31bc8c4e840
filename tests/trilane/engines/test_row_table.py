"""Where a table of rows lies, what its reads take, and what a command line says about it."""

from __future__ import annotations

from typing import Any

import pytest

from trilane.engines.question import Question
from trilane.engines.row_table import TableReads
from trilane.engines.speed import EngineAnswer, engine_answer
from trilane.output.pages.fit_engine import table_fact

MODEL = "qwen3.8-flash-next"
CARD: dict[str, Any] = {"gpu": "rtx-3090", "ram": "ddr5-6000", "cpu": "ryzen-9-7950x"}
NVME_4X4_MS = (96e3 + 131_072 / 1.73) / 1e6  # of a page fault alone: its latency, and 128 KiB at its rate


def answered(**asked: Any) -> tuple[EngineAnswer, TableReads]:
    question = Question(**{"model": MODEL, **asked})
    answer = engine_answer(question, question.model_shape, question.load_machine())
    assert answer.table is not None
    return answer, answer.table


def test_a_table_has_what_memory_is_left() -> None:
    answer, reads = answered(**CARD, ram_gb=96)
    assert reads.left_bytes == 96 * 2**30 - sum(answer.memory.host_parts.values())
    assert (reads.on_disk_bytes, reads.in_memory_bytes, reads.token_ms) == (0, reads.size_bytes, 0)
    assert answered(**CARD)[1].left_bytes is None  # memory of unknown size is taken as enough


def test_rows_without_room_are_faults_one_after_another() -> None:
    _, reads = answered(**CARD, ram_gb=64)
    share = reads.on_disk_bytes / reads.size_bytes
    assert 0 < share < 1
    assert reads.token_ms == pytest.approx(share * 16 * NVME_4X4_MS)


def test_a_named_disk_reads_them() -> None:
    slow = answered(**CARD, ram_gb=64, disk="sata-ssd")[1]
    assert slow.disk == "sata-ssd"
    assert slow.token_ms > answered(**CARD, ram_gb=64)[1].token_ms


def test_prompts_of_a_strix_halo_lose_what_was_measured() -> None:
    """Tokens/s with rows as faults and with direct reads, of random tokens (ggml-org/llama.cpp PR 29030)."""
    for slow, fast in ((181.0, 400.8), (191.7, 421.1)):
        lost_ms = (1 / slow - 1 / fast) * 1e3
        assert lost_ms == pytest.approx(16 * NVME_4X4_MS, rel=0.11)


def test_one_memory_leaves_a_table_what_the_system_does_not_take() -> None:
    answer, reads = answered(gpu="strix-halo")
    used = sum(answer.memory.gpu_parts.values()) - answer.memory.reserve_bytes
    assert reads.left_bytes == answer.memory.gpu_bytes - used - 4_000_000_000


def test_next_to_a_gpu_of_one_memory_a_table_without_room_has_to_be_left_in_the_file() -> None:
    """There llama.cpp loads it by itself (PR 28326)."""
    answer, reads = answered(gpu="strix-halo", weights="q6_k")
    assert reads.on_disk_bytes
    assert answer.command.endswith("-lzm on")
    assert "-lzm" not in answered(gpu="strix-halo")[0].command
    assert "-lzm" not in answered(**CARD, ram_gb=64)[0].command


def test_a_page_says_where_it_lies() -> None:
    reads = TableReads("n-gram table", 28_800_000_000, 16, 90.0, 10_000_000_000, "nvme-4x4", 1.8)
    assert table_fact(reads) == [(
        "n-gram table",
        "28.8 GB more, of which a token reads 16 rows of 90 bytes: 18.8 GB stay in the file, whose reads (nvme-4x4) "
        "take 1.80 ms a token at most, of prompts too; no time above counts them",
    )]
    assert table_fact(reads._replace(left_bytes=None))[0][1].endswith("the memory that is left has room")
    assert table_fact(None) == []
