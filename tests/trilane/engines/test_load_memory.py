"""Memory at load: worked by hand, and as llama.cpp itself plans it for eight families."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.kit.depth import thinned
from tests.kit.loadable_ggufs import FAMILIES, TWICE_AS_DEEP, write_loadable
from traces.models.attention import Attention
from traces.models.gguf_model import read_gguf_model
from traces.models.shape import ModelShape
from trilane.engines.load_memory import LoadMemory, LoadSetting, load_memory

GROUPED = ModelShape(
    name="hand", moe_layers=2, dense_layers=0, experts=4, top_k=2, hidden=8, expert_width=16, heads=4, kv_heads=1,
    head_dim=4, kv_width=8, attention_params=100, vocab=1000, weight_bits=8, dense_bits=8, kv_bits=16,
)
ONE_PIECE = LoadSetting(context_tokens=300, ubatch_tokens=64)


def test_a_grouped_cache_with_flash_attention() -> None:
    """512 cells of 8 elements in 2 bytes, twice; a piece's inputs: 4 rows of 8 in 4 bytes, 512 cells of a mask in 2."""
    inputs = 64 * (4 * 8 * 4 + 512 * 2)
    weights = 2 * 4 * 3 * 8 * 16 + 2 * (100 + 8 * 4) + 1000 * 8
    found = load_memory(GROUPED, ONE_PIECE)
    assert found == LoadMemory(weights, 2 * 512 * 8 * 2, 64 * 1000 * 4 + inputs, 1000 * 8, inputs)
    assert found.gpu_bytes == weights + 2 * 512 * 8 * 2 + 64 * 1000 * 4 + inputs


def test_without_flash_attention_scores_are_there_with_queries_and_outputs() -> None:
    """4 heads x 16,384 cells, twice 4 heads of 4; masks in 32 bits, 64-bit places of the 4 elements of values."""
    setting = replace(ONE_PIECE, context_tokens=16_384, flash_attention=False)
    inputs = 64 * (4 * 8 * 4 + 16_384 * 4 + 4 * 8)
    assert load_memory(GROUPED, setting).compute_bytes == 64 * 4 * (4 * 16_384 + 2 * 4 * 4) + inputs


def test_a_window_has_cells_for_itself_and_a_piece() -> None:
    """128 + 64 tokens: 256 cells; 512 for the layer that attends to everything. Two masks."""
    kinds = (Attention("full", 100, 4, 4, 8), Attention("window", 100, 4, 4, 8, span=128))
    shape = replace(GROUPED, attention=kinds, attention_layers=(0, 1))
    found = load_memory(shape, ONE_PIECE)
    assert found.kv_bytes == (512 + 256) * 8 * 2
    assert found.host_compute_bytes == 64 * (4 * 8 * 4 + (512 + 256) * 2)


def test_sequences_have_caches_of_their_own_and_states_no_cells() -> None:
    """300 tokens for two: 150 each, 256 cells."""
    kinds = (Attention("full", 100, 4, 4, 8), Attention("state", 100, 4, 4, state_bytes=999))
    shape = replace(GROUPED, attention=kinds, attention_layers=(0, 1))
    assert load_memory(shape, replace(ONE_PIECE, sequences=2)).kv_bytes == 2 * (256 * 8 * 2 + 999)


def test_experts_on_the_host_leave_the_gpu_and_a_matrix_is_copied() -> None:
    """An expert has 3 x 8 x 16 bytes; results of one product, and of two, for two experts of each of 64 tokens."""
    shape, on_host = replace(GROUPED, vocab=10), replace(ONE_PIECE, cpu_layers=1)
    plain, found = load_memory(shape, ONE_PIECE), load_memory(shape, on_host)
    inputs = found.host_compute_bytes
    assert plain.weights_bytes - found.weights_bytes == 4 * 3 * 8 * 16
    assert found.host_weights_bytes == 4 * 3 * 8 * 16 + 10 * 8
    assert plain.compute_bytes == 64 * 4 * 2 * 3 * 16 + inputs
    assert found.compute_bytes == max(64 * 4 * 2 * 3 * 16, 4 * 8 * 16 + 64 * 4 * 2 * 2 * 16) + inputs


LATE = replace(  # 4 heads of 4 in all layers; the cache of all tokens is first used behind the first experts
    GROUPED, moe_layers=4, vocab=10, experts=512, attention_layers=(0, 1, 0, 1),
    attention=(Attention("window", 100, 4, 4, 8, span=128), Attention("full", 100, 4, 4, 8)),
)
MATRIX, ROWS, WINDOW, FULL = 512 * 8 * 16, 64 * 4 * 8 * 4, 64 * 256 * 2, 64 * 16_384 * 2


def compute_bytes(on_host: int, context: int = 16_384, **changed: Any) -> int:
    setting = replace(ONE_PIECE, context_tokens=context, cpu_layers=on_host)
    return load_memory(replace(LATE, **changed), setting).compute_bytes


def test_a_mask_that_comes_with_a_later_part_is_gone_at_the_logits() -> None:
    """Without cuts it is there from the first part on."""
    assert compute_bytes(0, vocab=10**6) == 64 * 4 * 10**6 + ROWS + WINDOW + FULL
    assert compute_bytes(1, vocab=10**6) == 64 * 4 * 10**6 + ROWS + WINDOW


def test_a_matrix_is_copied_above_a_mask_that_lies_above_the_place_of_another() -> None:
    """In the third block, while the fourth layer still needs the mask; the second block's have the place itself."""
    of_chosen = 64 * 4 * 2  # an element of each
    assert compute_bytes(2) == ROWS + WINDOW + FULL + MATRIX + of_chosen * 2 * 16
    assert compute_bytes(3) == ROWS + WINDOW + FULL + 2 * MATRIX + of_chosen * 16


def test_biases_of_experts_leave_no_hole() -> None:
    assert compute_bytes(3, expert_biases=True) == compute_bytes(2)


def test_without_a_gpu_everything_is_in_one_memory() -> None:
    found, other = load_memory(GROUPED, replace(ONE_PIECE, gpu=False)), load_memory(GROUPED, ONE_PIECE)
    assert (found.host_weights_bytes, found.host_compute_bytes) == (0, 0)
    assert found.weights_bytes == GROUPED.routed_bytes + GROUPED.non_expert_bytes
    assert found.compute_bytes == other.compute_bytes + 64 * 8 * 4


def test_tied_embeddings_are_on_both_sides() -> None:
    found = load_memory(replace(GROUPED, tied_embeddings=True), ONE_PIECE)
    assert found.host_weights_bytes == 8000
    assert found.weights_bytes == GROUPED.routed_bytes + 2 * (100 + 8 * 4) + 8000


KV_TYPES = {1: 16.0, 8: 8.5, 2: 4.5}  # numbers of ggml: f16, q8_0, q4_0
SETTINGS = [
    {"c": context, "ub": ubatch, "fa": flash, "kv": kv, "np": sequences}
    for context, ubatch, (flash, kv), sequences in product(
        (512, 5000, 16_384), (128, 512, 2048), ((1, 1), (1, 8), (1, 2), (0, 1)), (1,)
    )
] + [{"c": 16_384, "ub": 512, "fa": flash, "kv": 1, "np": 4} for flash in (0, 1)]
ALL = 99  # blocks
WORST = {("gemma4", True, ALL): 0.04}  # without flash attention; all others are within 3 %
BORDER = ("gemma4, twice as deep", 5000, 128)  # a mask nearly as large as a row of hidden states: 285 to 419 MiB


@pytest.mark.llama
@pytest.mark.skipif(sys.platform != "linux", reason="the wheel's structures are those of Linux")
@pytest.mark.parametrize(
    ("gpu", "cpu_layers"), [(True, 0), (True, 2), (True, ALL), (False, 0)], ids=["gpu", "split", "host", "cpu"]
)
@pytest.mark.parametrize("family", [*FAMILIES, *TWICE_AS_DEEP])
def test_llama_cpp_plans_as_much(family: str, gpu: bool, cpu_layers: int, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed: pip install 'trilane[llama]'")
    file = write_loadable(family, tmp_path / "m.gguf")
    shape = read_gguf_model(file)
    case = (family, gpu, cpu_layers)
    for asked, said in zip(SETTINGS, planned(file, gpu, cpu_layers), strict=True):
        setting = LoadSetting(
            asked["c"], asked["np"], asked["ub"], bool(asked["fa"]), gpu=gpu,
            cpu_layers=sum(block < cpu_layers for block in shape.expert_blocks),
        )
        ours = load_memory(replace(shape, kv_bits=KV_TYPES[asked["kv"]]), setting)
        assert ours.kv_bytes / 2**20 == pytest.approx(sum(said["cache"]), rel=0.001, abs=0.02), asked
        if (family, asked["c"], asked["ub"]) != BORDER or not cpu_layers:
            assert ours.compute_bytes / 2**20 == pytest.approx(said["compute"][0], rel=WORST.get(case, 0.03)), asked


@thinned(3)
@pytest.mark.llama
@pytest.mark.parametrize("family", ["olmoe", "gpt-oss", "deepseek2"])
def test_llama_cpp_loads_as_many_weights(family: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed: pip install 'trilane[llama]'")
    file = write_loadable(family, tmp_path / "m.gguf")
    found = load_memory(read_gguf_model(file), replace(ONE_PIECE, gpu=False)).weights_bytes / 2**20
    assert found == pytest.approx(sum(planned(file, False, 0, [])), rel=0.001)


def planned(file: Path, gpu: bool, cpu_layers: int, settings: list[dict[str, int]] = SETTINGS) -> list[Any]:
    asked = {"file": str(file), "gpu": gpu, "cpu_layers": cpu_layers, "settings": settings}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.llama_load"], input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found
