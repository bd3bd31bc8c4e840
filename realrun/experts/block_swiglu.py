"""SwiGLU experts whose weights are in blocks: as they are on the CPU, unpacked before every product on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from realrun.experts.ffn import Choices, InOneCall, SwiGlu, compute_into, weighted_ffn
from realrun.machine.native_ffn import NativeFfn
from realrun.machine.weight_formats import BlockFormat

# Of the native kernel: with many rows, unpacking the weights once and torch's product take less. Where that begins
# differs between processors; this is a choice, not a measurement.
MOST_ROWS = 64


@dataclass(frozen=True)
class BlockSwiGlu(SwiGlu, InOneCall):
    """``ffn`` None: torch unpacks the weights on the CPU too, which takes tens of times as long for one token."""

    blocks: BlockFormat = field(kw_only=True)
    ffn: NativeFfn | None = field(kw_only=True)

    def compute(
        self, views: Mapping[str, Tensor], x: Tensor, choices: Choices, weights: Tensor, top_k: int, out: Tensor, *,
        scattered: bool,
    ) -> bool:  # fmt: skip
        """See ``InOneCall.compute``: always this one. Weights and ``out`` float32, ``x`` bfloat16."""
        if x.device.type == "cpu" and self.ffn is not None:
            numbers = torch.tensor((choices.start,)) if isinstance(choices, slice) else choices
            if len(numbers) <= MOST_ROWS:
                first, down = views["gate_up_proj" if self.has_gate else "up_proj"], views["down_proj"]
                self.ffn(
                    first, down, x.contiguous(), numbers.contiguous(), weights.contiguous(), top_k, out,
                    scattered=scattered, threads=torch.get_num_threads(), blocks=self.blocks,
                )  # fmt: skip
                return True
        plain, unpacked = SwiGlu(self.has_gate), {name: self.blocks.unpacked(view) for name, view in views.items()}
        if scattered:
            compute_into(out, plain, unpacked, x, choices, weights, top_k)
        else:
            weighted_ffn(plain, unpacked, x, choices, weights, top_k, out)
        return True
