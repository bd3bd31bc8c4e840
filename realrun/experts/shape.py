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
from realrun.machine.weight_formats import BLOCK, FORMATS
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
        whole = not any(size % BLOCK for size in sizes)  # rows are whole blocks
        if whole and (blocks := FORMATS.get(shape.weight_bits)):
            kernel = BlockSwiGlu(gated, blocks=blocks, ffn=native_ffn())
            return cls(torch.bfloat16, ExpertLayout.from_shape(*sizes, blocks, gated), kernel)
        dtype = _dtype_of(shape)
        ffn = native_ffn() if dtype == torch.bfloat16 else None  # which supports no other
        plain = SwiGlu(gated) if ffn is None else NativeSwiGlu(gated, ffn=ffn)
        return cls(dtype, ExpertLayout.from_shape(*sizes, dtype, gated), plain)


def _dtype_of(shape: ModelShape) -> torch.dtype:
    if shape.weight_bits not in _DTYPES:
        raise RefusedError(
            f"{shape.name}: expected weights of 16 or 32 bits (bfloat16, float32), 8.5 (q8_0) or 4.5 (q4_0), got "
            f"{shape.weight_bits:g}: other quantised experts, and rows that are not multiples of 32, can only be "
            "simulated"
        )
    return _DTYPES[shape.weight_bits]
