"""The shape of a Mixture-of-Experts model: every size that time and memory depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trilane.common.errors import TrilaneError
from trilane.common.hints import Count
from trilane.common.schema import check, from_dict, to_dict


class ShapeError(TrilaneError):
    """A model shape that no model can have."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model. Widths are in elements, counts are per model unless the name says otherwise.

    ``moe_layers`` counts the layers with routed experts only; layers in a trace are numbered 0..moe_layers-1.
    ``expert_bytes`` gives the size of one routed expert in each MoE layer (files quantised per layer differ);
    empty means "width x bits, the same everywhere".
    """

    name: str
    moe_layers: Count
    dense_layers: int  # layers whose feed-forward part is not a mixture
    experts: Count  # routed experts per MoE layer
    top_k: Count
    hidden: Count
    expert_width: Count  # intermediate width of one routed expert
    shared_experts: int = 0
    shared_width: int = 0  # intermediate width of all shared experts of a layer together
    dense_width: int = 0  # intermediate width of a dense layer's feed-forward part
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    kv_width: int = 0  # KV-cache elements per token and layer (2 x kv_heads x head_dim; 576 for DeepSeek's MLA)
    attention_params: int = 0  # weights of one layer's attention projections
    vocab: int = 0
    tied_embeddings: bool = False
    norm_topk: bool = True  # are the chosen weights renormalised to sum 1
    matrices_per_expert: int = 3  # gate, up, down; 2 where there is no gate
    weight_bits: float = 16.0  # bits per routed-expert weight
    dense_bits: float = 16.0  # bits per weight of everything else
    kv_bits: float | None = None  # bits per element of the KV cache; None: as ``dense_bits``
    expert_bytes: tuple[int, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # field name -> where the number is from

    def __post_init__(self) -> None:
        check(self, ShapeError)
        if self.top_k > self.experts:
            raise ShapeError(f"model shape {self.name!r}: top_k {self.top_k} exceeds the {self.experts} experts")
        if self.expert_bytes and len(self.expert_bytes) != self.moe_layers:
            raise ShapeError(
                f"model shape {self.name!r}: expert_bytes needs an entry for each of the {self.moe_layers} MoE layers, "
                f"got {len(self.expert_bytes)}"
            )

    @property
    def base_name(self) -> str:
        """The name of the model that this one is cut from (``NAME:N``), or its own."""
        return self.name.partition(":")[0]

    @property
    def layers(self) -> int:
        """All layers, dense ones included."""
        return self.moe_layers + self.dense_layers

    def expert_bytes_of(self, layer: int) -> int:
        """Bytes of one routed expert of MoE layer ``layer``."""
        if self.expert_bytes:
            return self.expert_bytes[layer]
        return round(self.matrices_per_expert * self.hidden * self.expert_width * self.weight_bits / 8)

    @property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(self.expert_bytes_of(layer) * self.experts for layer in range(self.moe_layers))

    @property
    def dense_params_per_moe_layer(self) -> int:
        """Weights of one MoE layer outside its routed experts: attention, gate, shared experts."""
        return self.attention_params + self.hidden * self.experts + 3 * self.hidden * self.shared_width

    @property
    def non_expert_params(self) -> int:
        """Weights outside the routed experts: attention, gates, shared experts, dense layers, embeddings."""
        moe = self.moe_layers * self.dense_params_per_moe_layer
        dense = self.dense_layers * (self.attention_params + 3 * self.hidden * self.dense_width)
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab * self.hidden
        return moe + dense + embeddings

    @property
    def params(self) -> int:
        """All weights but those of norms and biases."""
        expert = self.matrices_per_expert * self.hidden * self.expert_width
        return self.moe_layers * self.experts * expert + self.non_expert_params

    @property
    def non_expert_bytes(self) -> int:
        """Bytes of everything that is always on the GPU: all weights but the routed experts'."""
        return round(self.non_expert_params * self.dense_bits / 8)

    @property
    def cache_bits(self) -> float:
        """Bits per element of the KV cache."""
        return self.dense_bits if self.kv_bits is None else self.kv_bits

    @property
    def kv_bytes_per_token(self) -> int:
        """KV-cache bytes that one token of one sequence takes over all layers."""
        return round(self.layers * self.kv_width * self.cache_bits / 8)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ``from_dict`` is its inverse.

        ``kv_bits`` is there only if it is set: the checksums of traces written before there was one stay as they were.
        """
        return to_dict(self, nulls=False)

    @classmethod
    def from_dict(cls, values: object) -> ModelShape:
        """Build a shape from ``to_dict`` output. Raises ShapeError."""
        return from_dict(cls, values, "model shape", ShapeError)
