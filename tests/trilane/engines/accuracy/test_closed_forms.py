"""The closed forms, by hand: Mixtral-8x7B in 16 bits, the experts of 10 of its 32 layers in DRAM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.costs.engine import load_engine
from sim.machine.hardware import load_hardware
from tests.kit.measured_rows import row
from traces.models.catalogue import load_model
from trilane.engines.accuracy.scores import data_sheet, llmfit, sheet_prompt_s, token_bytes
from trilane.engines.split_speed import StaticSplit

MACHINE = load_hardware("rtx-4080+ddr5-5600+ryzen-9-7950x")
SHAPE = load_model("mixtral-8x7b")
EXPERT = 3 * 4096 * 14336 * 2  # bytes
ATTENTION = (2 * 4096 * 4096 + 2 * 4096 * 1024) * 2  # of a layer: queries and output, keys and values
OTHERS = 32 * (ATTENTION + 4096 * 8 * 2) + 32000 * 4096 * 2  # with gates and head
CACHE = 32 * 2 * 1024 * 2  # keys and values of a token
GPU, DRAM, LINK, FLOPS = 717e9, 2 * 5.6e9 * 8, 31.5e9, 97.5e12
SPLIT = StaticSplit(10)
ROW = row(model="mixtral-8x7b", weights="bf16", cpu_layers=10, depth_tokens=1000, generated_tokens=128)


def test_bytes_of_a_token() -> None:
    read = token_bytes(SHAPE, MACHINE, SPLIT, 1064)
    assert read.gpu_weights == OTHERS + 22 * 2 * EXPERT
    assert read.cpu_weights == 10 * 2 * EXPERT
    assert read.cache == 1064 * CACHE


def test_some_experts_of_these_layers_on_the_gpu() -> None:
    read = token_bytes(SHAPE, MACHINE, StaticSplit(10, gpu_experts=2), 0)
    assert read.cpu_weights == 10 * 2 * EXPERT * 6 / 8
    assert sum(read) == sum(token_bytes(SHAPE, MACHINE, SPLIT, 0))


def test_data_sheet() -> None:
    seconds = (OTHERS + 22 * 2 * EXPERT + 1064 * CACHE) / GPU + 10 * 2 * EXPERT / DRAM
    assert data_sheet(ROW).decode == pytest.approx(1 / seconds)
    assert data_sheet(ROW).prompts is None


def test_llmfit() -> None:
    seconds = 10 * 2 * EXPERT / DRAM + (OTHERS + 22 * 2 * EXPERT) / (0.55 * GPU)
    assert llmfit(ROW) == (pytest.approx(0.8 / seconds), None)


def test_data_sheet_of_a_prompt_copies_experts_once_a_piece() -> None:
    """1,000 tokens in two pieces."""
    products = 1000 * (OTHERS + 32 * 2 * EXPERT) / FLOPS  # two operations a weight of two bytes
    copies = 2 * 10 * 8 * EXPERT / LINK
    assert sheet_prompt_s(SHAPE, MACHINE, load_engine("llama.cpp"), SPLIT, 1000) == pytest.approx(products + copies)


def test_data_sheet_of_a_prompt_that_the_cpu_computes() -> None:
    products = 1000 * (OTHERS + 22 * 2 * EXPERT) / FLOPS + 1000 * 10 * 2 * EXPERT / MACHINE.cpu.flops_per_s
    found = sheet_prompt_s(SHAPE, MACHINE, load_engine("llama.cpp"), replace(SPLIT, repacked=True), 1000)
    assert found == pytest.approx(products)


def test_without_a_gpu_all_bytes_are_in_dram() -> None:
    alone = replace(ROW, machine="none+ddr5-5600+ryzen-9-7950x", cpu_layers=32)
    weights = OTHERS + 32 * 2 * EXPERT
    assert data_sheet(alone).decode == pytest.approx(DRAM / (weights + 1064 * CACHE))
    assert llmfit(alone).decode == pytest.approx(0.8 * DRAM / weights)
