"""The shape of a Mixture-of-Experts model: every size that time and memory depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from trilane.common.errors import TrilaneError
from trilane.common.hints import Name, above, at_most, between
from trilane.common.schema import check, from_dict, to_dict

# The limits are some hundred times the sizes of today's largest models, and keep every product within 63 bits.
MOST_EXPERTS = 2**15  # of a layer: ids in traces are int16
_ALL_EXPERTS = 2**18
_MOST_BYTES = 10**15
_Layers = Annotated[int, between(1, 1000)]
_Size = Annotated[int, between(1, 1_000_000)]
_SizeOrNone = Annotated[int, between(0, 1_000_000)]
_Bits = Annotated[float, above(0), at_most(64)]


class ShapeError(TrilaneError):
    """A model shape that no model can have."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model. Widths are in elements, counts are per model unless the name says otherwise.

    ``moe_layers`` counts the layers with routed experts only; layers in a trace are numbered 0..moe_layers-1.
    ``expert_bytes`` gives the size of one routed expert in each MoE layer (files quantised per layer differ);
    empty means "width x bits, the same everywhere".
    """

    name: Name
    moe_layers: _Layers
    dense_layers: Annotated[int, between(0, 1000)]  # layers whose feed-forward part is not a mixture
    experts: Annotated[int, between(1, MOST_EXPERTS)]  # routed experts per MoE layer
    top_k: Annotated[int, between(1, MOST_EXPERTS)]
    hidden: _Size
    expert_width: _Size  # intermediate width of one routed expert
    shared_experts: _SizeOrNone = 0
    shared_width: _SizeOrNone = 0  # intermediate width of all shared experts of a layer together
    dense_width: _SizeOrNone = 0  # intermediate width of a dense layer's feed-forward part
    heads: _Size = 1
    kv_heads: _Size = 1
    head_dim: _Size = 1
    kv_width: _SizeOrNone = 0  # KV-cache elements per token and layer (2 x kv_heads x head_dim; 576 for DeepSeek's MLA)
    attention_params: Annotated[int, between(0, 1e12)] = 0  # weights of one layer's attention projections
    vocab: Annotated[int, between(0, 1e8)] = 0
    tied_embeddings: bool = False
    norm_topk: bool = True  # are the chosen weights renormalised to sum 1
    matrices_per_expert: Annotated[int, between(1, 8)] = 3  # gate, up, down; 2 where there is no gate
    weight_bits: _Bits = 16.0  # bits per routed-expert weight
    dense_bits: _Bits = 16.0  # bits per weight of everything else
    kv_bits: _Bits | None = None  # bits per element of the KV cache; None: as ``dense_bits``
    expert_bytes: tuple[Annotated[int, between(1, _MOST_BYTES)], ...] = ()
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
        experts, size = self.moe_layers * self.experts, self.routed_bytes + self.non_expert_bytes
        if experts > _ALL_EXPERTS or size > _MOST_BYTES or not self.routed_bytes:
            raise ShapeError(
                f"model shape {self.name!r}: expected at most {_ALL_EXPERTS:,} experts in all layers together, of one "
                f"byte or more each, and at most {_MOST_BYTES:.0e} bytes of weights, got {experts:,} experts and "
                f"{size:,} bytes, {self.routed_bytes:,} of them in experts"
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
