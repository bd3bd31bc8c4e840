"""The blocks of a GGUF file's weights: by kind of matrix, with the share of each type."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realrun.llama_cpp.kernel_engine import piece_ns
from sim.costs.engine import load_engine
from sim.costs.kernel_costs import kernel_steps
from tests.kit.loadable_ggufs import write_loadable
from tests.kit.overlay import ROOT
from tests.traces.models.gguf_files import F32, Q4_0, Q8_0, write_gguf
from traces.models.catalogue import load_model
from traces.models.gguf_blocks import gguf_blocks
from traces.models.quantisation import WeightBlocks


def test_each_kind_of_matrix_has_its_own_types(tmp_path: Path) -> None:
    file = write_loadable("olmoe", tmp_path / "m.gguf")
    assert gguf_blocks(file) == WeightBlocks({"q4_0": 1.0}, {"q4_0": 1.0}, {"q8_0": 1.0}, {"q8_0": 1.0}, {"q8_0": 1.0})


def test_shares_are_those_of_the_weights_and_tied_heads_are_the_embeddings(tmp_path: Path) -> None:
    """Of attention a quarter is in q4_0; norms, routers and biases are no such matrices."""
    table = [
        ("token_embd.weight", (64, 100), Q4_0), ("blk.0.attn_q.weight", (64, 64), Q4_0),
        ("blk.0.attn_k.weight", (64, 192), Q8_0), ("blk.0.attn_norm.weight", (64,), F32),
        ("blk.0.ffn_gate_inp.weight", (64, 4), F32), ("blk.0.ffn_gate_up_exps.weight", (64, 64, 4), Q8_0),
        ("blk.0.ffn_down_exps.weight", (32, 64, 4), Q4_0), ("blk.0.ffn_down_exps.bias", (64, 4), F32),
    ]
    found = gguf_blocks(write_gguf(tmp_path / "m.gguf", {"general.architecture": "olmoe"}, table))
    q4_0, q8_0 = {"q4_0": 1.0}, {"q8_0": 1.0}
    assert found == WeightBlocks(q8_0, q4_0, {"q4_0": 0.25, "q8_0": 0.75}, q4_0, q4_0)


def test_a_file_that_has_changed_is_read_anew(tmp_path: Path) -> None:
    first = gguf_blocks(write_loadable("olmoe", tmp_path / "m.gguf"))
    file = write_loadable("olmoe", tmp_path / "m.gguf", experts=Q8_0)
    os.utime(file, ns=(1, 1))
    assert (first.down, gguf_blocks(file).down) == ({"q4_0": 1.0}, {"q8_0": 1.0})


def test_measured_kernels_compute_a_file_with_its_own_blocks(tmp_path: Path) -> None:
    kernels = load_engine(str(ROOT / "docs/validation/llama.cpp/engine.yaml")).kernels
    assert kernels is not None
    small, large = (load_model(str(write_loadable("olmoe", tmp_path / f"{each}.gguf", each))) for each in (Q4_0, Q8_0))
    ns = [piece_ns(kernel_steps(shape, kernels, 2), 1, 64) for shape in (small, large)]
    assert ns[1] / ns[0] == pytest.approx(1.3, abs=0.25)
