"""Larger pieces of a prompt: told where they shorten the first token, with what they cost."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kit.fit_questions import QWEN, answered


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
        {**QWEN, "prompt_tokens": 500},
        {**QWEN, "ubatch": 512},
        {"model": "qwen3-30b-a3b", "gpu": "none", "ram": "ddr5-5600"},
        {**QWEN, "generated": 10_000},  # the answer as a whole would end later
    ],
)
def test_larger_pieces_are_not_told_where_they_give_little(asked: dict[str, Any]) -> None:
    assert answered(**asked).larger_pieces is None
