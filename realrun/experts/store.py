"""The weights of all routed experts in host memory, from which experts are copied to the GPU and read by the CPU.

Each expert's weights are laid out in one contiguous buffer, so that one copy moves all of them.

The GPU has an arena of slots: equal buffers that experts are copied into, as the session decides. All cache slots are
alike, and so are the staging slots of one quota. A free staging slot keeps its last expert until another copy takes the
slot, since the session may still adopt that expert; the order is that of ``policies.mechanism.residency``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from policies.mechanism.views import Copy, ExpertId, Swap
from policies.protocols import Needs
from realrun.errors import RefusedError
from realrun.machine.weight_formats import BlockFormat
from sim.runs.cards import LayerBlock
from sim.runs.prepare import Prepared

ALIGNMENT_BYTES = 64  # a cache line, and the alignment of ordinary torch tensors, on which kernels may depend


@dataclass(frozen=True)
class WeightPart:
    """One weight matrix or bias of an expert, at ``offset_bytes`` in its buffer."""

    name: str  # as the library's experts modules call it, such as gate_up_proj
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Size of the weights, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExpertLayout:
    """The parts of every expert of a layer, each at a multiple of 64 bytes."""

    parts: tuple[WeightPart, ...]

    @classmethod
    def of_parts(cls, parts: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> ExpertLayout:
        """Parts one after another, in the given order."""
        placed: list[WeightPart] = []
        for name, shape, dtype in parts:
            placed.append(WeightPart(name, shape, dtype, _end_bytes(placed)))
        return cls(tuple(placed))

    @classmethod
    def from_module(cls, experts: nn.Module) -> ExpertLayout:
        """The layout for a module of the library that holds all E experts of a layer: one slice of each parameter.

        Parameters may be on the meta device. Raises RefusedError if they differ in E.
        """
        parameters = expert_parameters(experts)
        if len({len(value) for value in parameters.values()}) != 1:
            shapes = {name: tuple(value.shape) for name, value in parameters.items()}
            raise RefusedError(
                f"{type(experts).__name__}: expected parameters with one slice for every expert, all of the same "
                f"leading dimension, found {shapes}; the executor does not support this family"
            )
        return cls.of_parts((name, tuple(value.shape[1:]), value.dtype) for name, value in parameters.items())

    @classmethod
    def from_shape(
        cls, hidden: int, width: int, weights: torch.dtype | BlockFormat, gated: bool = True
    ) -> ExpertLayout:
        """The layout for an expert of a given shape; with a gate, its rows come first in ``gate_up_proj``.

        ``weights``: their type, or the blocks that they are in, of which rows are whole ones.
        """
        first = ("gate_up_proj", 2 * width, hidden) if gated else ("up_proj", width, hidden)
        matrices = (first, ("down_proj", hidden, width))
        if isinstance(weights, BlockFormat):
            return cls.of_parts((name, (rows, weights.row_bytes(size)), torch.uint8) for name, rows, size in matrices)
        return cls.of_parts((name, (rows, columns), weights) for name, rows, columns in matrices)

    @property
    def size_bytes(self) -> int:
        """Size of one expert's buffer, a multiple of 64."""
        return _end_bytes(self.parts)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The parts of the expert in ``buffer`` (uint8 [bytes or more], 64-byte aligned), as views."""
        return {
            part.name: buffer.narrow(0, part.offset_bytes, part.size_bytes).view(part.dtype).view(part.shape)
            for part in self.parts
        }


def expert_parameters(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of an experts module that hold all experts: those with at least 2 dimensions."""
    return {name: value for name, value in experts.named_parameters(recurse=False) if value.ndim >= 2}


def _end_bytes(parts: Iterable[WeightPart]) -> int:
    end = max((part.offset_bytes + part.size_bytes for part in parts), default=0)
    return math.ceil(end / ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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


class HostExperts(Protocol):
    """The weights of experts that the host holds: all of them (``ExpertStore``), or some (``expert_file``)."""

    @property
    def layouts(self) -> tuple[ExpertLayout, ...]:
        """The layout of every layer."""

    def buffer(self, layer: int, expert: int) -> Tensor:
        """One held expert's weights: uint8 [layouts[layer].size_bytes]."""

    def place(self, expert_id: ExpertId, target: Tensor) -> None:
        """Copy an expert to the GPU before the run, held or not."""


class ExpertStore:
    """One slab for each layer."""

    def __init__(self, slabs: Iterable[Slab]) -> None:
        self.slabs = tuple(slabs)
        self.layouts = tuple(slab.layout for slab in self.slabs)

    @property
    def size_bytes(self) -> int:
        """Size of all experts of all layers."""
        return sum(slab.memory.numel() for slab in self.slabs)

    def buffer(self, layer: int, expert: int) -> Tensor:
        """One expert's weights: uint8 [layouts[layer].size_bytes]."""
        return self.slabs[layer].memory[expert]

    def place(self, expert_id: ExpertId, target: Tensor) -> None:
        """Copy an expert to the GPU before the run."""
        target.copy_(self.buffer(*expert_id))

    def part(self, block: LayerBlock) -> ExpertStore:
        """The layers of a block, numbered from 0, in the same memory."""
        return ExpertStore(self.slabs[block.first : block.end])


def random_store(layout: ExpertLayout, layers: int, experts: int, allocate: Allocate, seed: int = 0) -> ExpertStore:
    """Random experts to measure with, each in its own memory, for which the caller has checked that there is room.

    All parts must have one type. Magnitudes are 0.01 to 0.03, so that nothing overflows or is denormal, even in half
    precision: both would take time that real weights do not. Values repeat from block to block.
    """
    return ExpertStore(list(random_slabs(layout, layers, experts, allocate, seed)))


def random_slabs(
    layout: ExpertLayout, layers: int, experts: int, allocate: Allocate, seed: int = 0
) -> Iterator[Slab]:
    """The slabs of ``random_store``, one at a time."""
    block = _random_block(layout.parts[0].dtype, seed)
    for _ in range(layers):
        slab = Slab.allocated(layout, experts, allocate)
        for piece in slab.memory.view(-1).view(block.dtype).split(len(block)):  # type: ignore[no-untyped-call]
            piece.copy_(block[: len(piece)])
        yield slab


def _random_block(dtype: torch.dtype, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:  # weights in blocks, at any offset: scales are 2^-11 to 2^-9, numbers 16 to 23
        return torch.randint(0x10, 0x18, (BLOCK_ELEMENTS,), dtype=dtype, generator=random)
    magnitudes = torch.rand(BLOCK_ELEMENTS, generator=random) * 0.02 + 0.01
    signs = torch.randint(0, 2, (BLOCK_ELEMENTS,), generator=random) * 2 - 1
    return (magnitudes * signs).to(dtype)


# --- slots on the GPU -------------------------------------------------------------------------------------------------


Group = Literal["cache", "demand", "prefetch"]


class GpuSlots:
    """Slots in ``arena`` [slots, bytes] uint8; the first ``demand`` + ``prefetch`` are staging slots."""

    def __init__(self, arena: Tensor, demand: int, prefetch: int) -> None:
        buffers = iter(arena)
        self._free: dict[Group, deque[tuple[Tensor, ExpertId | None]]] = {
            "demand": deque((next(buffers), None) for _ in range(demand)),
            "prefetch": deque((next(buffers), None) for _ in range(prefetch)),
        }
        self._free["cache"] = deque((buffer, None) for buffer in buffers)
        self._held: dict[ExpertId, tuple[Tensor, Group]] = {}

    def buffer(self, expert_id: ExpertId) -> Tensor:
        """The slot of an expert that is on the GPU, or on its way there."""
        return self._held[expert_id][0]

    def place(self, expert_id: ExpertId) -> Tensor:
        """Take a cache slot before the first token; the caller fills it."""
        return self._take(expert_id, "cache")

    def begin(self, copy: Copy) -> Tensor:
        """Free the slots of a copy's victims, and return the slot that it goes to."""
        for victim in copy.victims:
            self._give(victim, keep=False)
        into: Group = "cache" if copy.into == "cache" else "prefetch" if copy.kind == "prefetch" else "demand"
        buffer = self._take(copy.key, into)
        if kept := self._kept(copy.key):  # it is copied again
            group, stale = kept
            self._free[group].appendleft((stale, None))
        return buffer

    def release(self, expert_id: ExpertId) -> None:
        """Free a staging slot; its expert stays readable until the slot is taken."""
        self._give(expert_id, keep=True)

    def evict(self, expert_id: ExpertId) -> None:
        """Free a cache slot without a copy that takes it."""
        self._give(expert_id, keep=False)

    def adopt(self, swap: Swap) -> None:
        """Exchange the slots of an expert in a free staging slot and one in a cache slot, without a copy."""
        kept = self._kept(swap.incoming)
        assert kept is not None
        group, buffer = kept
        emptied, _ = self._held.pop(swap.outgoing)
        self._free[group].appendleft((emptied, None))  # empty slots are taken first
        self._held[swap.incoming] = buffer, "cache"

    def _kept(self, expert_id: ExpertId) -> tuple[Group, Tensor] | None:
        """Take the free slot that still has an expert, if there is one."""
        for group, free in self._free.items():
            for place, (buffer, intact) in enumerate(free):
                if intact == expert_id:
                    del free[place]
                    return group, buffer
        return None

    def _take(self, expert_id: ExpertId, group: Group) -> Tensor:
        buffer, _ = self._free[group].popleft()
        self._held[expert_id] = buffer, group
        return buffer

    def _give(self, expert_id: ExpertId, keep: bool) -> None:
        buffer, group = self._held.pop(expert_id)
        if keep:
            self._free[group].append((buffer, expert_id))
        else:
            self._free[group].appendleft((buffer, None))


def check_one_width(policy: str, needs: Needs) -> None:
    """Raises RefusedError for a policy with narrow copies of experts: slots and kernels are for one width."""
    if needs.narrow_share is not None:
        raise RefusedError(
            f"policy {policy!r} needs copies of experts in fewer bits, which the executor does not have; simulate it, "
            "or choose another policy"
        )


def slots_needed(prepared: Prepared) -> list[int]:
    """The number of a run's cache and staging slots on each GPU. Raises RefusedError for narrow copies."""
    check_one_width(prepared.composition.name, prepared.needs)
    size, policy = prepared.shape.expert_bytes_by_layer[0], prepared.composition
    return [memory.cache_bytes // size + policy.demand_slots + policy.prefetch_slots for memory in prepared.card_memory]
