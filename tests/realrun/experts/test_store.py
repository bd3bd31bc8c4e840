"""Experts in host memory: the layout of one in its buffer, and a store of random ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from realrun.errors import RefusedError
from realrun.experts import ffn as expert_shape
from realrun.experts import store as expert_store
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
from realrun.experts.store import ExpertLayout, ExpertStore, Slab, WeightPart, random_store
from realrun.machine.pinned import plain
from tests.kit.tiny_models import ALL, model_of
from traces.capture.layers import find_moe_layers
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple), st.sampled_from(DTYPES)), max_size=5
)


def test_parts_begin_at_multiples_of_64_bytes() -> None:
    layout = ExpertLayout.of_parts([("up_proj", (3, 5), torch.bfloat16), ("down_proj", (5, 3), torch.float32)])
    assert layout.parts == (
        WeightPart("up_proj", (3, 5), torch.bfloat16, 0),  # 30 bytes
        WeightPart("down_proj", (5, 3), torch.float32, 64),  # 60 bytes
    )
    assert layout.size_bytes == 128


def test_a_shape_gives_the_librarys_matrices() -> None:
    gated = ExpertLayout.from_shape(hidden=32, width=48, weights=torch.bfloat16)
    assert [(p.name, p.shape) for p in gated.parts] == [("gate_up_proj", (96, 32)), ("down_proj", (32, 48))]
    assert gated.size_bytes == 3 * 32 * 48 * 2
    ungated = ExpertLayout.from_shape(hidden=32, width=48, weights=torch.float32, gated=False)
    assert [(p.name, p.shape) for p in ungated.parts] == [("up_proj", (48, 32)), ("down_proj", (32, 48))]


@given(PARTS)
def test_views_share_the_buffer_and_not_each_other(parts: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    layout = ExpertLayout.of_parts((f"part{n}", shape, dtype) for n, (shape, dtype) in enumerate(parts))
    buffer = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    assert layout.size_bytes % 64 == 0
    for number, part in enumerate(layout.parts):
        view = views[part.name]
        assert (view.shape, view.dtype) == (part.shape, part.dtype)
        assert view.data_ptr() == buffer.data_ptr() + part.offset_bytes
        assert view.data_ptr() % 64 == 0
        view.fill_(number + 1)
    assert all((views[part.name] == number + 1).all() for number, part in enumerate(layout.parts))


def test_a_larger_slot_serves_too() -> None:
    layout = ExpertLayout.from_shape(4, 4, torch.float32)
    assert layout.views(torch.zeros(layout.size_bytes + 640, dtype=torch.uint8))["down_proj"].shape == (4, 4)


class Experts(nn.Module):
    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))


def test_a_module_gives_one_slice_of_each_parameter_of_all_experts() -> None:
    experts = Experts(
        gate_up_proj=torch.zeros(8, 6, 4), gate_up_proj_bias=torch.zeros(8, 6), down_proj=torch.zeros(8, 4, 3),
        scale=torch.zeros(1),
    )
    layout = ExpertLayout.from_module(experts.bfloat16())
    assert [(p.name, p.shape) for p in layout.parts] == [
        ("gate_up_proj", (6, 4)),
        ("gate_up_proj_bias", (6,)),
        ("down_proj", (4, 3)),
    ]
    assert {part.dtype for part in layout.parts} == {torch.bfloat16}


def test_parameters_that_disagree_about_the_number_of_experts_are_refused() -> None:
    experts = Experts(gate_up_proj=torch.zeros(12, 6, 4), down_proj=torch.zeros(8, 4, 3))
    with pytest.raises(RefusedError, match=r"same leading dimension.*'gate_up_proj': \(12, 6, 4\)"):
        ExpertLayout.from_module(experts)


LAYOUT = ExpertLayout.from_shape(hidden=32, width=48, weights=torch.bfloat16)


def noting(asked: list[int]) -> Callable[[int], torch.Tensor]:
    def allocate(size_bytes: int) -> torch.Tensor:
        asked.append(size_bytes)
        return plain(size_bytes)

    return allocate


def test_memory_is_asked_for_by_layer() -> None:
    asked: list[int] = []
    store = random_store(LAYOUT, layers=3, experts=5, allocate=noting(asked))
    assert asked == [5 * LAYOUT.size_bytes] * 3
    assert store.size_bytes == 15 * LAYOUT.size_bytes
    assert store.layouts == (LAYOUT,) * 3


def test_every_expert_has_memory_of_its_own() -> None:
    store = random_store(LAYOUT, layers=2, experts=3, allocate=plain)
    for number in range(6):
        store.buffer(number // 3, number % 3).fill_(number)
    assert all((store.buffer(number // 3, number % 3) == number).all() for number in range(6))
    assert all(store.buffer(layer, expert).data_ptr() % 64 == 0 for layer in range(2) for expert in range(3))


def test_layers_may_differ() -> None:
    small, large = (ExpertLayout.from_shape(32, width, torch.float32) for width in (16, 64))
    store = ExpertStore([Slab.allocated(small, 4, plain), Slab.allocated(large, 2, plain)])
    assert [len(store.buffer(layer, 1)) for layer in range(2)] == [small.size_bytes, large.size_bytes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights_are_normal_numbers_and_so_is_what_comes_of_them(dtype: torch.dtype) -> None:
    layout = ExpertLayout.from_shape(64, 96, dtype)
    weights = layout.views(random_store(layout, layers=1, experts=2, allocate=plain, seed=3).buffer(0, 1))
    smallest = torch.finfo(dtype).tiny
    assert all((value.abs() >= smallest).all() and value.isfinite().all() for value in weights.values())
    assert all(-0.01 < value.float().mean() < 0.01 for value in weights.values())
    assert expert_ffn(SwiGlu(), weights, torch.ones(2, 64, dtype=dtype)).isfinite().all()


def test_random_experts_differ_and_come_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_store, "BLOCK_ELEMENTS", 1000)  # shorter than an expert, so that it repeats

    def first(seed: int) -> torch.Tensor:
        return random_store(LAYOUT, layers=1, experts=2, allocate=plain, seed=seed).buffer(0, 0)

    store = random_store(LAYOUT, layers=1, experts=2, allocate=plain)
    assert not torch.equal(store.buffer(0, 0), store.buffer(0, 1))
    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))




# --- One expert at a time, in any order -------------------------------------------------------------------------------


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
