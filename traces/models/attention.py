"""Attention of a layer: what it keeps of earlier tokens, and how much of that a step reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from trilane.common.hints import between

Reach = Literal["full", "window", "chunk", "state"]
Size = Annotated[int, between(0, 1_000_000)]
Width = Annotated[int, between(1, 1_000_000)]
Weights = Annotated[int, between(0, 1e12)]

STATE_BYTES = 4  # of an element of a state


@dataclass(frozen=True)
class Attention:
    """One kind of attention layer.

    ``reach`` says which tokens a token attends to: ``full``, all before it; ``window``, the last ``span`` with itself;
    ``chunk``, those before it in its chunk of ``span`` tokens. ``state`` is linear attention or a state-space model:
    a sequence keeps ``state_bytes`` whatever its length, in place of keys and values.
    """

    reach: Reach
    params: Weights  # weights of the projections
    heads: Width = 1
    head_dim: Width = 1
    kv_width: Size = 0  # KV-cache elements of a token
    span: Annotated[int, between(0, 1e9)] = 0  # tokens of a window or chunk
    state_bytes: Weights = 0  # of a sequence

    @property
    def latent(self) -> bool:
        """True if all heads share one compressed vector a token (DeepSeek's MLA), which is no whole number of heads."""
        return self.kv_width > 0 and self.kv_width % (2 * self.head_dim) != 0

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, where these are not latent."""
        return max(self.kv_width // (2 * self.head_dim), 1)

    def kept(self, tokens: int) -> int:
        """Tokens of a sequence of ``tokens`` that stay in the KV cache."""
        if self.reach == "state":
            return 0
        return tokens if self.reach == "full" else min(tokens, self.span)

    def cache_bytes(self, tokens: int, bits: float) -> float:
        """Bytes that a sequence of ``tokens`` keeps, with ``bits`` per element of keys and values."""
        return self.kept(tokens) * self.kv_width * bits / 8 + self.state_bytes

    def read(self, new: float, length: float) -> float:
        """Tokens whose keys and values are read by the last ``new`` tokens of a sequence of ``length``."""
        if self.reach == "state":
            return 0
        if self.reach == "window":
            return min(length, self.span + new - 1)
        return length - (length - new) // self.span * self.span if self.reach == "chunk" else length

    def pairs(self, new: float, length: float) -> float:
        """Query-key pairs of the last ``new`` tokens of a sequence of ``length``; none with a state."""
        return self._all_pairs(length) - self._all_pairs(length - new)

    def _all_pairs(self, length: float) -> float:
        """Pairs of all tokens of a sequence."""
        if self.reach == "state":
            return 0
        if self.reach == "full" or length <= self.span:
            return length * (length + 1) / 2
        if self.reach == "window":
            return self.span * (self.span + 1) / 2 + (length - self.span) * self.span
        chunks, rest = divmod(length, self.span)
        return chunks * self.span * (self.span + 1) / 2 + rest * (rest + 1) / 2
