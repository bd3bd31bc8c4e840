"""Experts in host memory: the layout of one in its buffer, and a store of random ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from realrun.errors import RefusedError
from realrun.experts import store as expert_store
from realrun.experts.ffn import SwiGlu, expert_ffn
from realrun.experts.store import ExpertLayout, ExpertStore, Slab, WeightPart, random_store
from realrun.machine.pinned import plain

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
