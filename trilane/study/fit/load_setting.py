"""The options of llama.cpp that memory depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from traces.models.attention import Attention

_CELLS = 256  # of a cache, rounded up

Copied = Literal["matrix", "layer", "nothing"]  # at once, of experts on the host


@dataclass(frozen=True)
class LoadSetting:
    """The options of llama.cpp that memory depends on."""

    context_tokens: int  # -c: of all sequences together
    sequences: int = 1  # -np
    ubatch_tokens: int = 512  # -ub
    flash_attention: bool = True
    cpu_layers: int = 0  # MoE layers whose experts are on the host, from the first on
    gpu: bool = True
    copied: Copied = "matrix"  # of these experts to the GPU, for prompts

    @property
    def copies(self) -> bool:
        """Whether experts are copied to the GPU for prompts."""
        return self.copied != "nothing" and self.cpu_layers > 0 and self.gpu

    @property
    def piece_tokens(self) -> int:
        """Tokens of a piece of a prompt."""
        return min(self.ubatch_tokens, self.cells)

    @property
    def cells(self) -> int:
        """Of a sequence, in the cache of a layer that attends to everything."""
        return _padded(-(-self.context_tokens // self.sequences))

    def cells_of(self, kind: Attention) -> int:
        """Of a sequence, in the cache of a layer of this kind."""
        if kind.reach == "state":
            return 0
        return self.cells if kind.reach == "full" else min(self.cells, _padded(kind.span + self.ubatch_tokens))


def _padded(tokens: int) -> int:
    return -(-tokens // _CELLS) * _CELLS
