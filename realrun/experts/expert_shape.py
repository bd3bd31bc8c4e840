"""An expert that is known by its model's shape alone: the type of its weights, how they lie, what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from realrun.errors import RefusedError
from realrun.experts.expert_ffn import SwiGlu
from realrun.experts.expert_layout import ExpertLayout
from realrun.experts.native_swiglu import NativeSwiGlu
from realrun.machine.native_ffn import native_ffn
from traces.model_shape import ModelShape

_DTYPES: Mapping[float, torch.dtype] = {16.0: torch.bfloat16, 32.0: torch.float32}


class ExpertShape(NamedTuple):
    """``dtype``: of its weights, and of what it is applied to; ``layout`` of its buffer; ``kernel``."""

    dtype: torch.dtype
    layout: ExpertLayout
    kernel: SwiGlu

    @classmethod
    def of(cls, shape: ModelShape) -> ExpertShape:
        """Of every routed expert of a model. Raises RefusedError where we have no kernels for its weights."""
        dtype, gated = _dtype_of(shape), shape.matrices_per_expert == 3
        layout = ExpertLayout.from_shape(shape.hidden, shape.expert_width, dtype, gated)
        return cls(dtype, layout, _kernel(dtype, gated))


def _kernel(dtype: torch.dtype, gated: bool) -> SwiGlu:
    """The CPU's own kernel is of bfloat16."""
    ffn = native_ffn() if dtype == torch.bfloat16 else None
    return SwiGlu(gated) if ffn is None else NativeSwiGlu(gated, ffn=ffn)


def _dtype_of(shape: ModelShape) -> torch.dtype:
    if len(set(shape.expert_bytes)) > 1:
        raise RefusedError(f"{shape.name}: expected experts of one size, this file's differ by layer; simulate it")
    if shape.weight_bits not in _DTYPES:
        raise RefusedError(
            f"{shape.name}: expected weights of 16 or 32 bits (bfloat16, float32), got {shape.weight_bits:g}: "
            "quantised experts are simulated, not measured"
        )
    return _DTYPES[shape.weight_bits]
