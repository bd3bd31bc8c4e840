"""SwiGLU experts that the CPU computes in one native call each, for replays: of bfloat16, or with weights in blocks.

The native kernel adds in another order than torch, so results differ by rounding. ``generate``, whose results equal the
library's to the bit, uses torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from realrun.experts.ffn import Choices, InOneCall, SwiGlu, compute_into, weighted_ffn
from realrun.machine.native_ffn import NativeFfn
from realrun.machine.weight_formats import BlockFormat

# Rows up to which weights in blocks are multiplied by the native kernel; beyond, unpacking them once for torch's
# product is faster. The limit differs between processors; this one is chosen, not measured.
MOST_ROWS = 64
_TYPES = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)  # of weights, x, router weights, out


@dataclass(frozen=True)
class NativeSwiGlu(SwiGlu, InOneCall):
    """``SwiGlu``, with torch on a GPU, and on the CPU for more rows than ``ffn`` is fast for."""

    ffn: NativeFfn = field(kw_only=True)

    def compute(
        self, views: Mapping[str, Tensor], x: Tensor, choices: Choices, weights: Tensor, top_k: int, out: Tensor, *,
        scattered: bool,
    ) -> bool:
        """As in ``InOneCall``; False on a GPU, for many rows, and for tensors of other types or with gaps."""
        if x.device.type != "cpu":
            return False
        numbers = _numbers(choices)
        if not 0 < len(numbers) <= self.ffn.only_up_to:
            return False
        first, down = _matrices(self, views)
        types = (first.dtype, x.dtype, weights.dtype, out.dtype)
        if types != _TYPES or not (x.is_contiguous() and weights.is_contiguous() and out.is_contiguous()):
            return False
        threads = torch.get_num_threads()  # of the calling lane
        self.ffn(first, down, x, numbers, weights, top_k, out, scattered=scattered, threads=threads)
        return True


@dataclass(frozen=True)
class BlockSwiGlu(SwiGlu, InOneCall):
    """``SwiGlu`` with weights in ``blocks``, which are unpacked before every product on a GPU.

    ``ffn`` None: torch unpacks the weights on the CPU too, which takes tens of times as long for one token.
    """

    blocks: BlockFormat = field(kw_only=True)
    ffn: NativeFfn | None = field(kw_only=True)

    def compute(
        self, views: Mapping[str, Tensor], x: Tensor, choices: Choices, weights: Tensor, top_k: int, out: Tensor, *,
        scattered: bool,
    ) -> bool:
        """As in ``InOneCall``; always True. ``weights`` and ``out`` are float32, ``x`` is bfloat16."""
        if x.device.type == "cpu" and self.ffn is not None and len(numbers := _numbers(choices)) <= MOST_ROWS:
            self.ffn(
                *_matrices(self, views), x.contiguous(), numbers, weights.contiguous(), top_k, out,
                scattered=scattered, threads=torch.get_num_threads(), blocks=self.blocks,
            )
            return True
        plain, unpacked = SwiGlu(self.has_gate), {name: self.blocks.unpacked(view) for name, view in views.items()}
        if scattered:
            compute_into(out, plain, unpacked, x, choices, weights, top_k)
        else:
            weighted_ffn(plain, unpacked, x, choices, weights, top_k, out)
        return True


def _numbers(choices: Choices) -> Tensor:
    return torch.tensor((choices.start,)) if isinstance(choices, slice) else choices.contiguous()


def _matrices(kernel: SwiGlu, views: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return views["gate_up_proj" if kernel.has_gate else "up_proj"], views["down_proj"]
