"""Block formats of weights, as in ggml, in which experts can be replayed in addition to bfloat16.

A block holds 32 neighbouring weights of a row: a scale of 16 bits (IEEE half), then a number for each weight, whose
value is scale times number (ggml/src/ggml-common.h, block_q8_0 and block_q4_0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32  # weights, QK8_0 and QK4_0


class BlockFormat(NamedTuple):
    """``number``: of native/blocks.h; ``block_bytes`` of a block; ``numbers``: int8 [.., 32] without the scale."""

    number: int
    block_bytes: int
    numbers: Callable[[Tensor], Tensor]

    def row_bytes(self, weights: int) -> int:
        """The size of a row with ``weights`` weights, a multiple of 32."""
        return weights // BLOCK * self.block_bytes

    def unpacked(self, packed: Tensor) -> Tensor:
        """uint8 [R, row bytes] -> bfloat16 [R, C]; on any device."""
        blocks = packed.view(len(packed), -1, self.block_bytes)
        scales = blocks[..., :2].contiguous().view(torch.float16)
        return (self.numbers(blocks[..., 2:]) * scales).bfloat16().view(len(packed), -1)

    def random(self, rows: int, columns: int, random: torch.Generator) -> Tensor:
        """uint8 [rows, row bytes], with weights of the order of columns^-1/2."""
        blocks = torch.randint(0, 256, (rows, columns // BLOCK, self.block_bytes), dtype=torch.uint8, generator=random)
        largest = 2.0 ** (8 * (self.block_bytes - 2) / BLOCK - 1)  # number
        scales = (torch.rand(rows, columns // BLOCK, 1, generator=random) + 1) / largest * columns**-0.5
        blocks[..., :2] = scales.half().view(torch.uint8)
        return blocks.view(rows, -1)


def _halves_of_bytes(pairs: Tensor) -> Tensor:
    """Weights 0 to 15 are in the lower halves, 16 to 31 in the upper halves; 8 stands for 0."""
    return torch.cat((pairs & 15, pairs >> 4), -1).view(torch.int8) - 8


Q8_0 = BlockFormat(1, 34, lambda numbers: numbers.view(torch.int8))
Q4_0 = BlockFormat(2, 18, _halves_of_bytes)
FORMATS: Mapping[float, BlockFormat] = {8.5: Q8_0, 4.5: Q4_0}  # by bits per weight, including its share of the scale
