"""Experts that are known by their model's shape alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from realrun.errors import RefusedError
from realrun.experts import ffn as expert_shape
from realrun.experts.ffn import (
    BlockSwiGlu,
    ExpertShape,
    SwiGlu,
)
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape

TOY = ModelShape("toy", moe_layers=2, dense_layers=0, experts=4, top_k=2, hidden=32, expert_width=16)


@pytest.mark.parametrize(("bits", "dtype"), [(16.0, torch.bfloat16), (32.0, torch.float32)])
@pytest.mark.parametrize("matrices", [3, 2])
def test_type_layout_and_kernel_follow_from_the_shape(
    bits: float, dtype: torch.dtype, matrices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_shape, "native_ffn", lambda: None)  # see test_native_ffn.py
    shape = replace(TOY, weight_bits=bits, matrices_per_expert=matrices)
    found = ExpertShape.of(shape)
    assert (found.dtype, found.kernel) == (dtype, SwiGlu(has_gate=matrices == 3))
    assert [(part.name, part.shape, part.dtype) for part in found.layout.parts] == [
        ("gate_up_proj", (32, 32), dtype) if matrices == 3 else ("up_proj", (16, 32), dtype),
        ("down_proj", (32, 16), dtype),
    ]
    assert found.layout.size_bytes == shape.expert_bytes_by_layer[0]


@pytest.mark.parametrize("quantisation", ["q8_0", "q4_0"])
@pytest.mark.parametrize("model", ["deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_weights_in_blocks_take_the_bytes_that_the_catalogue_says(model: str, quantisation: str) -> None:
    shape = load_model(f"{model}@{quantisation}")
    found = ExpertShape.of(shape)
    assert isinstance(found.kernel, BlockSwiGlu)
    assert found.layout.size_bytes == shape.expert_bytes_by_layer[0]
    assert {part.dtype for part in found.layout.parts} == {torch.uint8}


def test_what_we_have_no_kernels_for_is_refused() -> None:
    for bits, width in ((4.84375, 32), (4.5, 16)):
        with pytest.raises(RefusedError, match=rf"toy: expected weights of 16 or 32 bits .*, got {bits:g}: other"):
            ExpertShape.of(replace(TOY, weight_bits=bits, expert_width=width))
    with pytest.raises(RefusedError, match="toy: expected experts of one size, these differ by layer"):
        ExpertShape.of(replace(TOY, expert_bytes=(3072, 1536)))
