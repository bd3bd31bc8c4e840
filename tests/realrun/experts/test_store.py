"""Experts in host memory, and a store of random ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from realrun.experts import store as expert_store
from realrun.experts.ffn import SwiGlu, expert_ffn
from realrun.experts.store import (
    ExpertLayout,
    ExpertStore,
    Slab,
    random_store,
)
from realrun.machine.pinned import plain

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
