"""One expert at a time, in any order: the same bits as the library's own computation; kernels by a model's shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from realrun.errors import RefusedError
from realrun.experts import ffn as expert_shape
from realrun.experts.ffn import (
    BlockSwiGlu,
    Choices,
    ExpertShape,
    SwiGlu,
    addressed,
    check_kernel,
    compute_into,
    expert_ffn,
)
from realrun.experts.store import ExpertLayout, Slab
from realrun.machine.pinned import plain
from tests.kit.tiny_models import ALL, model_of
from traces.capture.layers import find_moe_layers
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape

TOKENS = 7


def copied(experts: nn.Module, count: int) -> Slab:
    slab = Slab.allocated(ExpertLayout.from_module(experts), count, plain)
    for expert in range(count):
        for name, view in slab.views(expert).items():
            view.copy_(getattr(experts, name)[expert])
    return slab


def one_by_one(
    experts: Any, slab: Slab, x: Tensor, ids: Tensor, weights: Tensor, address: Callable[[Tensor], Choices] = addressed
) -> Tensor:
    """Every active expert by itself, the last one first."""
    tokens, top_k = ids.shape
    parts = torch.empty(tokens * top_k, x.shape[1], dtype=torch.result_type(x, weights))
    for expert in sorted(set(ids.reshape(-1).tolist()), reverse=True):
        choices = torch.nonzero(ids.reshape(-1) == expert).squeeze(1)
        compute_into(parts, experts, slab.views(expert), x, address(choices), weights.reshape(-1), top_k)
    return parts.view(tokens, top_k, -1).sum(1).to(x.dtype)


@pytest.mark.parametrize("family", ALL)
def test_experts_one_by_one_in_any_order_give_the_librarys_bits(family: str) -> None:
    # GPT-OSS: elementwise kernels round by vectors of 64, across rows unless these are as wide (as real models' are)
    changes = {"intermediate_size": 64} if family == "gpt_oss" else {}
    layer = find_moe_layers(model_of(family, **changes))[-1]
    for dtype in (torch.float32, torch.bfloat16):
        experts = layer.experts.to(dtype)
        slab = copied(experts, layer.experts_count)
        for top_k in (2, 4):
            random = torch.Generator().manual_seed(top_k)
            x = torch.randn(TOKENS, layer.hidden, generator=random).to(dtype)
            ids = torch.rand(TOKENS, layer.experts_count, generator=random).topk(top_k).indices
            for weights in (shares := torch.rand(TOKENS, top_k, generator=random), shares.to(dtype)):
                with torch.inference_mode():
                    expected = grouped_mm_experts_forward(experts, x, ids, weights)
                    assert torch.equal(one_by_one(experts, slab, x, ids, weights), expected), (dtype, top_k)


@pytest.mark.parametrize("family", ALL)
def test_a_single_choice_by_its_slice_gives_the_bits_of_a_list_of_one(family: str) -> None:
    layer = find_moe_layers(model_of(family, **({"intermediate_size": 64} if family == "gpt_oss" else {})))[-1]
    random = torch.Generator().manual_seed(0)
    for dtype, tokens in ((torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 3), (torch.bfloat16, 3)):
        experts = layer.experts.to(dtype)
        slab = copied(experts, layer.experts_count)
        x = torch.randn(tokens, layer.hidden, generator=random).to(dtype)
        ids = torch.rand(tokens, layer.experts_count, generator=random).topk(2).indices
        weights = torch.rand(tokens, 2, generator=random)
        with torch.inference_mode():
            by_list = one_by_one(experts, slab, x, ids, weights, address=lambda choices: choices)
            assert torch.equal(one_by_one(experts, slab, x, ids, weights), by_list), (dtype, tokens)


def test_only_a_single_choice_is_a_slice() -> None:
    assert addressed(torch.tensor([5])) == slice(5, 6)
    evenly = torch.tensor([1, 3, 5])
    assert addressed(evenly) is evenly


@pytest.mark.parametrize("gated", [True, False])
def test_swiglu_without_a_model(gated: bool) -> None:
    weights = ExpertLayout.from_shape(16, 24, torch.float32, gated).views(torch.randint(0, 64, (9216,)).byte())
    for value in weights.values():
        value.normal_()
    x = torch.randn(3, 16)
    if gated:
        gate, up = weights["gate_up_proj"][:24], weights["gate_up_proj"][24:]
        inner = nn.functional.silu(x @ gate.T) * (x @ up.T)
    else:
        inner = nn.functional.silu(x @ weights["up_proj"].T)
    found = expert_ffn(SwiGlu(has_gate=gated), weights, x)
    torch.testing.assert_close(found, inner @ weights["down_proj"].T)


FLAGS = {"has_gate": True, "has_bias": False, "is_transposed": False, "_apply_gate": None}


@pytest.mark.parametrize(("experts", "reason"), [
    (nn.Linear(2, 2), "Linear: expected an experts module of the library's registry"),
    (SimpleNamespace(**FLAGS, has_post_expert_norm=True), "end with a norm"),
    (SimpleNamespace(**FLAGS, _is_expert_parallel=True), "spread over processes"),
])
def test_experts_that_compute_something_else_are_refused(experts: Any, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        check_kernel(experts)


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
