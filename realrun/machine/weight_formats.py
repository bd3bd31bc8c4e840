"""Weights of experts in blocks, as in ggml, which torch has no products for.

A block holds neighbouring weights of a row (ggml/src/ggml-common.h). In q8_0 and q4_0 it is a scale of 16 bits (IEEE
half), then a number for each of 32 weights, whose value is scale times number. In q4_K it is two scales, then 12 bytes
with numbers of 6 bits, a scale and a minimum for each 32 of 256 weights, then the weights' numbers: a weight is
first scale times its scale's number times its own, less second scale times its minimum's number.

Sixteen rows, a *band*, are stored block by block, as llama.cpp repacks eight rows for its CPU: of each block the scales
of all rows, then four bytes of each row, the next four of each, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32  # weights with one scale, QK8_0 and QK4_0
SUPER_BLOCK = 256  # weights of a block of q4_K, QK_K
BAND = 16  # rows


class BlockFormat(NamedTuple):
    """A block of ``weights``, in ``size_bytes``; ``values``: blocks uint8 [.., size_bytes] -> float32 [.., weights];
    ``scales``: of the block, at its beginning, the largest of which is to be multiplied with numbers up to ``largest``.

    ``number``: of native/blocks.h.
    """

    number: int
    weights: int
    size_bytes: int
    scales: int
    largest: float
    values: Callable[[Tensor], Tensor]

    def row_bytes(self, weights: int) -> int:
        """The size of a row with ``weights`` weights, which are whole blocks."""
        return weights // self.weights * self.size_bytes

    def weights_of(self, row_bytes: int) -> int:
        """The weights of a row of so many bytes."""
        return row_bytes // self.size_bytes * self.weights

    def unpacked(self, packed: Tensor) -> Tensor:
        """uint8 [R, row bytes] -> bfloat16 [R, C]; on any device. R is a multiple of 16."""
        return self.values(self._rows(packed)).flatten(1).bfloat16()

    def packed(self, blocks: Tensor) -> Tensor:
        """Blocks of rows uint8 [R, blocks, size_bytes], as in a GGUF file -> uint8 [R, row bytes]."""
        rows, count, _ = blocks.shape
        bands = blocks.view(rows // BAND, BAND, count, -1).transpose(1, 2)
        parts = [_last_in(part, -1, each).transpose(-2, -3) for part, each in self._parts(bands)]
        return torch.cat([part.flatten(-3) for part in parts], -1).view(rows, -1)

    def _rows(self, packed: Tensor) -> Tensor:
        """The inverse of ``packed``."""
        bands = packed.view(len(packed) // BAND, -1, BAND * self.size_bytes)
        parts = [_last_in(part, -1, BAND, each).transpose(-2, -3) for part, each in self._parts(bands)]
        return torch.cat([part.flatten(-2) for part in parts], -1).transpose(1, 2).flatten(0, 1)

    def _parts(self, blocks: Tensor) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
        """The scales, and the rest, of blocks of one row or of a band; the bytes of each row that lie together."""
        scales = 2 * self.scales * (blocks.shape[-1] // self.size_bytes)
        return (blocks[..., :scales], 2), (blocks[..., scales:], 4)

    def random(self, rows: int, columns: int, random: torch.Generator) -> Tensor:
        """uint8 [rows, row bytes], with weights of the order of columns^-1/2."""
        return self.packed(self.random_blocks(rows, columns, random))

    def random_blocks(self, rows: int, columns: int, random: torch.Generator) -> Tensor:
        """Blocks of rows uint8 [rows, blocks, size_bytes], whose weights are of that order."""
        shape = (rows, columns // self.weights)
        blocks = torch.randint(0, 256, (*shape, self.size_bytes), dtype=torch.uint8, generator=random)
        scales = (torch.rand(*shape, self.scales, generator=random) + 1) / self.largest * columns**-0.5
        blocks[..., : 2 * self.scales] = scales.half().view(torch.uint8)
        return blocks


def _last_in(values: Tensor, *sizes: int) -> Tensor:
    """The last dimension in several."""
    return values.reshape(*values.shape[:-1], *sizes)


def _scale(blocks: Tensor, place: int) -> Tensor:
    return blocks[..., 2 * place : 2 * place + 2].contiguous().view(torch.float16).float()


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].view(torch.int8) * _scale(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    """Weights 0 to 15 are in the lower halves of the bytes, 16 to 31 in the upper halves; 8 stands for 0."""
    pairs = blocks[..., 2:]
    return (torch.cat((pairs & 15, pairs >> 4), -1).view(torch.int8) - 8) * _scale(blocks, 0)


def _q4_k(blocks: Tensor) -> Tensor:
    """Weights 0 to 31 are in the lower halves of 32 bytes, the next 32 in the upper halves, and so on."""
    low, middle, high = _last_in(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    pairs = _last_in(blocks[..., 16:], 4, BLOCK)
    numbers = torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3, -2)
    each = _scale(blocks, 0) * scales, _scale(blocks, 1) * minima
    return (each[0].unsqueeze(-1) * numbers - each[1].unsqueeze(-1)).flatten(-2)


Q8_0 = BlockFormat(1, BLOCK, 34, 1, 128, _q8_0)
Q4_0 = BlockFormat(2, BLOCK, 18, 1, 8, _q4_0)
Q4_K = BlockFormat(3, SUPER_BLOCK, 144, 2, 63 * 8, _q4_k)
FORMATS: Mapping[str, BlockFormat] = {"q8_0": Q8_0, "q4_0": Q4_0, "q4_k": Q4_K}
