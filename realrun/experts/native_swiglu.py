"""SwiGLU experts of bfloat16 that the CPU computes in one native call each: for replays.

Sums are added in another order than torch's, so that results differ by rounding. ``generate`` computes what the library
computes, to the bit, and stays with torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from realrun.experts.ffn import Choices, InOneCall, SwiGlu
from realrun.machine.native_ffn import NativeFfn


@dataclass(frozen=True)
class NativeSwiGlu(SwiGlu, InOneCall):
    """``SwiGlu`` by torch on a GPU, and on the CPU for more rows than ``ffn`` is fast for."""

    ffn: NativeFfn = field(kw_only=True)

    def compute(
        self, views: Mapping[str, Tensor], x: Tensor, choices: Choices, weights: Tensor, top_k: int, out: Tensor, *,
        scattered: bool,
    ) -> bool:  # fmt: skip
        """See ``InOneCall.compute``; False on a GPU, for many rows, and for tensors of other types or with gaps."""
        if x.device.type != "cpu":
            return False
        numbers = torch.tensor((choices.start,)) if isinstance(choices, slice) else choices.contiguous()
        if not 0 < len(numbers) <= self.ffn.only_up_to:
            return False
        first, down = views["gate_up_proj" if self.has_gate else "up_proj"], views["down_proj"]
        types = (first.dtype, x.dtype, weights.dtype, out.dtype)
        if types != _TYPES or not (x.is_contiguous() and weights.is_contiguous() and out.is_contiguous()):
            return False
        threads = torch.get_num_threads()  # of the calling lane
        self.ffn(first, down, x, numbers, weights, top_k, out, scattered=scattered, threads=threads)
        return True


_TYPES = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
