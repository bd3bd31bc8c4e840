"""Models of random weights: sizes as read back, blocks as unpacked by the package gguf, and routing in llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from realrun.llama_cpp.random_gguf import random_blocks, weights_bytes, write_random_gguf
from traces.models.catalogue import load_model
from traces.models.gguf_model import read_gguf_model
from traces.models.quantisation import WeightBlocks, weight_blocks
from traces.models.shape import ModelShape, ShapeError

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: pip install 'trilane[llama]'")

BLOCKS = {name: name.upper() for name in ("bf16", "q4_0", "q5_0", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4")}
GROUPED = ModelShape(
    name="tiny", moe_layers=2, dense_layers=0, experts=8, top_k=2, hidden=256, expert_width=64, heads=4, kv_heads=2,
    head_dim=64, kv_width=256, attention_params=256 * (2 * 256 + 2 * 128), vocab=96,
)
LATENT = replace(
    GROUPED, dense_layers=1, dense_width=128, shared_experts=1, shared_width=64, kv_heads=4, head_dim=96, kv_width=128,
    attention_params=256 * 4 * 96 + 256 * 128 + 64 * 4 * 64 + 4 * 32 * 256,
)
UNGROUPED = replace(GROUPED, kv_heads=4, kv_width=512, attention_params=4 * 256 * 256)
FAMILIES = {"qwen3moe": GROUPED, "olmoe": UNGROUPED, "gpt-oss": GROUPED, "deepseek2": LATENT}


@pytest.mark.parametrize("block", BLOCKS)
def test_random_blocks_have_the_standard_deviation_asked_for(block: str) -> None:
    std = 1 / 32  # a power of two, as the scales of MXFP4 are
    made = random_blocks(block, 4096, std, np.random.default_rng(0))
    values = gguf.quants.dequantize(made, gguf.GGMLQuantizationType[BLOCKS[block]])
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.12 * std  # quants of q4_0 go from -8 to 7
    assert values.std() == pytest.approx(std, rel=0.35 if block == "mxfp4" else 0.02)


def test_a_block_that_is_not_known_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"'iq9'.*'?q4_0'?"):
        random_blocks("iq9", 1, 1.0, np.random.default_rng(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_has_the_sizes_of_its_shape(family: str, tmp_path: Path) -> None:
    shape, path = FAMILIES[family], tmp_path / "model.gguf"
    write_random_gguf(shape, family, WeightBlocks.uniform("bf16"), path)
    read = read_gguf_model(path)
    kind, _ = read.attention_counts[-1]
    found = (read.moe_layers, read.dense_layers, read.experts, read.top_k, read.hidden, read.expert_width, read.vocab)
    assert found == (2, shape.dense_layers, 8, 2, 256, 64, 96)
    assert (kind.params, kind.heads, kind.kv_width) == (shape.attention_params, 4, shape.kv_width)
    assert read.shared_width == shape.shared_width
    biases = 2 * 8 * 4 * (2 * 64 + 256) if family == "gpt-oss" else 0
    assert read.routed_bytes == shape.routed_bytes + biases


def test_a_mix_has_the_bytes_of_the_format(tmp_path: Path) -> None:
    shape = replace(load_model("qwen3-30b-a3b@q4_k_m"), moe_layers=4, experts=2, top_k=1, vocab=256)
    write_random_gguf(shape, "qwen3moe", weight_blocks(shape, "q4_k_m"), tmp_path / "m.gguf")
    assert read_gguf_model(tmp_path / "m.gguf").routed_bytes == shape.routed_bytes
    tensors = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    assert weights_bytes(shape, "qwen3moe", weight_blocks(shape, "q4_k_m")) == sum(each.n_bytes for each in tensors)


def test_rows_that_fill_no_block_have_another_one(tmp_path: Path) -> None:
    shape = replace(GROUPED, expert_width=96)
    write_random_gguf(shape, "qwen3moe", WeightBlocks.uniform("q4_k"), tmp_path / "m.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert (types["blk.1.ffn_up_exps.weight"], types["blk.1.ffn_down_exps.weight"]) == ("Q4_K", "Q5_0")


def test_experts_are_not_copies_of_each_other(tmp_path: Path) -> None:
    shape = replace(GROUPED, experts=64, expert_width=256)
    write_random_gguf(shape, "qwen3moe", WeightBlocks.uniform("q4_0"), tmp_path / "m.gguf")
    [up] = [t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.0.ffn_up_exps.weight"]
    assert len({expert.tobytes() for expert in up}) == 64


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path in files:
        write_random_gguf(GROUPED, "olmoe", WeightBlocks.uniform("q8_0"), path, seed=3)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_architecture_that_is_not_known_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="'mamba'"):
        write_random_gguf(GROUPED, "mamba", WeightBlocks.uniform("bf16"), tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


class Chosen:
    """Counts the experts that tokens chose, over all layers."""

    def __init__(self) -> None:
        self.counts = np.zeros(8, int)

    def wants(self, name: str) -> bool:
        return name.startswith("ffn_moe_topk-")

    def take(self, tensor: object) -> None:
        self.counts += np.bincount(tensor.values().ravel(), minlength=8)  # type: ignore[attr-defined]


@pytest.mark.llama
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_runs_it_and_every_expert_is_chosen_about_as_often(family: str, tmp_path: Path) -> None:
    from realrun.llama_cpp.model import LlamaContext, LlamaModel

    write_random_gguf(FAMILIES[family], family, WeightBlocks.uniform("q8_0"), tmp_path / "m.gguf")
    chosen = Chosen()
    with (
        LlamaModel(tmp_path / "m.gguf") as model,
        LlamaContext(model, context=256, piece=128, observer=chosen) as context,
    ):
        context.decode(np.random.default_rng(0).integers(0, 96, 200, dtype=np.int32), every_output=True)
        logits = context.logits()
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1
    share = chosen.counts / (2 * 200 * 2)
    assert share.sum() == 1
    assert share.min() > 0.04
    assert share.max() < 0.3
