"""The weights of all routed experts in host memory, from which experts are copied to the GPU and read by the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from realrun.experts.layout import ExpertLayout

Allocate: TypeAlias = Callable[[int], Tensor]  # bytes -> uint8 [bytes], 64-byte aligned: see realrun.machine.pinned

BLOCK_ELEMENTS = (1 << 21) + 32  # random values that are repeated; not a power of two, so that experts differ


@dataclass(frozen=True)
class Slab:
    """One layer's experts: ``memory`` uint8 [E, layout.size_bytes]."""

    layout: ExpertLayout
    memory: Tensor

    @classmethod
    def allocated(cls, layout: ExpertLayout, experts: int, allocate: Allocate) -> Slab:
        """Memory for a layer's experts, not filled."""
        return cls(layout, allocate(layout.size_bytes * experts).view(experts, layout.size_bytes))

    def views(self, expert: int) -> dict[str, Tensor]:
        """One expert's weights by name, in place."""
        return self.layout.views(self.memory[expert])


class ExpertStore:
    """One slab for each layer."""

    def __init__(self, slabs: Iterable[Slab]) -> None:
        self._slabs = tuple(slabs)
        self.layouts = tuple(slab.layout for slab in self._slabs)

    @property
    def size_bytes(self) -> int:
        """Size of all experts of all layers."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def buffer(self, layer: int, expert: int) -> Tensor:
        """One expert's weights: uint8 [layouts[layer].size_bytes]."""
        return self._slabs[layer].memory[expert]


def random_store(layout: ExpertLayout, layers: int, experts: int, allocate: Allocate, seed: int = 0) -> ExpertStore:
    """Random experts to measure with, each in its own memory, for which the caller has checked that there is room.

    All parts must have one type. Magnitudes are 0.01 to 0.03, so that nothing overflows or is denormal, even in half
    precision: both would take time that real weights do not. Values repeat from block to block.
    """
    block = _random_block(layout.parts[0].dtype, seed)
    slabs = [Slab.allocated(layout, experts, allocate) for _ in range(layers)]
    for slab in slabs:
        for piece in slab.memory.view(-1).view(block.dtype).split(len(block)):  # type: ignore[no-untyped-call]
            piece.copy_(block[: len(piece)])
    return ExpertStore(slabs)


def _random_block(dtype: torch.dtype, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:  # weights in blocks, at any offset: scales are 2^-11 to 2^-9, numbers 16 to 23
        return torch.randint(0x10, 0x18, (BLOCK_ELEMENTS,), dtype=dtype, generator=random)
    magnitudes = torch.rand(BLOCK_ELEMENTS, generator=random) * 0.02 + 0.01
    signs = torch.randint(0, 2, (BLOCK_ELEMENTS,), generator=random) * 2 - 1
    return (magnitudes * signs).to(dtype)
