"""Type, layout and kernel of a model's experts, from the model's shape alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from realrun.errors import RefusedError
from realrun.experts.cpu_kernels import BlockSwiGlu, NativeSwiGlu
from realrun.experts.ffn import SwiGlu
from realrun.experts.layout import ExpertLayout
from realrun.machine.native_ffn import native_ffn
from realrun.machine.weight_formats import BLOCK, FORMATS, BlockFormat
from traces.models.shape import ModelShape

_DTYPES: Mapping[float, torch.dtype] = {16.0: torch.bfloat16, 32.0: torch.float32}


class ExpertShape(NamedTuple):
    """``dtype``: of an expert's input, and of its weights unless they are in blocks; the layout of its buffer."""

    dtype: torch.dtype
    layout: ExpertLayout
    kernel: SwiGlu

    @classmethod
    def of(cls, shape: ModelShape) -> ExpertShape:
        """The shape of a model's routed experts. Raises RefusedError if there are no kernels for their weights."""
        gated, sizes = shape.matrices_per_expert == 3, (shape.hidden, shape.expert_width)
        if len(set(shape.expert_bytes)) > 1:
            raise RefusedError(
                f"{shape.name}: expected experts of one size, these differ by layer; it can only be simulated"
            )
        if blocks := _blocks_of(shape):
            kernel = BlockSwiGlu(gated, blocks=blocks, ffn=native_ffn())
            return cls(torch.bfloat16, ExpertLayout.in_blocks(*sizes, blocks, gated), kernel)
        dtype = _dtype_of(shape)
        return cls(dtype, ExpertLayout.from_shape(*sizes, dtype, gated), _kernel(dtype, gated))


def _kernel(dtype: torch.dtype, gated: bool) -> SwiGlu:
    """The native kernel supports bfloat16 only."""
    ffn = native_ffn() if dtype == torch.bfloat16 else None
    return SwiGlu(gated) if ffn is None else NativeSwiGlu(gated, ffn=ffn)


def _blocks_of(shape: ModelShape) -> BlockFormat | None:
    """None for weights that are not in blocks, or whose rows are not whole blocks."""
    whole = shape.hidden % BLOCK == shape.expert_width % BLOCK == 0
    return FORMATS.get(shape.weight_bits) if whole else None


def _dtype_of(shape: ModelShape) -> torch.dtype:
    if shape.weight_bits not in _DTYPES:
        raise RefusedError(
            f"{shape.name}: expected weights of 16 or 32 bits (bfloat16, float32), 8.5 (q8_0) or 4.5 (q4_0), got "
            f"{shape.weight_bits:g}: other quantised experts, and rows that are not multiples of 32, can only be "
            "simulated"
        )
    return _DTYPES[shape.weight_bits]
