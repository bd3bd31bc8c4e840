"""The shape of a Mixture-of-Experts model: every size that time and memory depend on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any

from traces.models.attention import Attention, Size, Weights, Width
from traces.models.names import parted
from trilane.common.errors import TrilaneError
from trilane.common.hints import Name, above, at_most, between
from trilane.common.schema import check, from_dict, to_dict

# The limits are some hundred times the sizes of today's largest models, and keep every product within 63 bits.
MOST_EXPERTS = 2**15  # of a layer: ids in traces are int16
_ALL_EXPERTS = 2**19
_MOST_BYTES = 10**15
_Layers = Annotated[int, between(1, 1000)]
_Bits = Annotated[float, above(0), at_most(64)]


class ShapeError(TrilaneError):
    """A model shape that no model can have."""


@dataclass(frozen=True)
class PartBits:
    """Bits per weight of a model's matrices outside the routed experts, by the part that they belong to."""

    attention: _Bits
    state: _Bits  # projections of linear attention and of state-space layers
    router: _Bits
    shared: _Bits  # shared experts
    dense: _Bits  # feed-forward parts of layers without experts
    embedding: _Bits
    head: _Bits

    @classmethod
    def uniform(cls, bits: float) -> PartBits:
        """Equal bits for all parts."""
        return cls(*[bits] * len(fields(cls)))

    def of_attention(self, kind: Attention) -> float:
        """Bits per weight of the projections of one kind of attention."""
        return self.state if kind.reach == "state" else self.attention


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model. Widths are in elements, counts are per model unless the name says otherwise.

    ``moe_layers`` counts the layers with routed experts only; layers in a trace are numbered 0..moe_layers-1.
    ``expert_bytes`` gives the size of one routed expert in each MoE layer (files quantised per layer differ);
    empty means "width x bits, the same everywhere". ``attention`` lists the kinds of attention of a model that has
    several, and ``attention_layers`` the number in that list of each layer, dense layers first; the widths of
    attention above are then those of its typical layer, which profiles and replays use for all of them.
    """

    name: Name
    moe_layers: _Layers
    dense_layers: Annotated[int, between(0, 1000)]  # layers whose feed-forward part is not a mixture
    experts: Annotated[int, between(1, MOST_EXPERTS)]  # routed experts per MoE layer
    top_k: Annotated[int, between(1, MOST_EXPERTS)]
    hidden: Width
    expert_width: Width  # intermediate width of one routed expert
    shared_experts: Size = 0
    shared_width: Size = 0  # intermediate width of all shared experts of a layer together
    dense_width: Size = 0  # intermediate width of a dense layer's feed-forward part
    heads: Width = 1
    kv_heads: Width = 1
    head_dim: Width = 1
    kv_width: Size = 0  # KV-cache elements per token and layer (2 x kv_heads x head_dim; 576 for DeepSeek's MLA)
    attention_params: Weights = 0  # weights of one layer's attention projections
    vocab: Annotated[int, between(0, 1e8)] = 0
    tied_embeddings: bool = False
    norm_topk: bool = True  # are the chosen weights renormalised to sum 1
    matrices_per_expert: Annotated[int, between(1, 8)] = 3  # gate, up, down; 2 where there is no gate; shared ones too
    weight_bits: _Bits = 16.0  # bits per routed-expert weight
    dense_bits: _Bits = 16.0  # bits per weight of everything else, the mean of all
    part_bits: PartBits | None = None  # of these, bits per weight by part; None: ``dense_bits`` for all
    kv_bits: _Bits | None = None  # bits per element of the KV cache; None: as ``dense_bits``
    expert_bytes: tuple[Annotated[int, between(1, _MOST_BYTES)], ...] = ()
    expert_tensor_bytes: Annotated[int, between(1, _MOST_BYTES)] | None = None  # see ``largest_expert_tensor_bytes``
    expert_biases: bool | None = None  # added to the products of routed experts; None: not known to be
    mtp_layers: Size | None = None  # that predict further tokens, and are not among the others; None: not known
    attention: tuple[Attention, ...] | None = None  # None: every layer attends to all earlier tokens
    attention_layers: tuple[int, ...] | None = None
    moe_blocks: tuple[Annotated[int, between(0, 4000)], ...] | None = None  # see ``expert_blocks``
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # field name -> where the number is from

    def __post_init__(self) -> None:
        check(self, ShapeError)
        for fault in (*self._faults(), *self._attention_faults()):
            raise ShapeError(f"model shape {self.name!r}: {fault}")
        experts, size = self.moe_layers * self.experts, self.routed_bytes + self.non_expert_bytes
        if experts > _ALL_EXPERTS or size > _MOST_BYTES or not self.routed_bytes:  # sizes that no product can hold
            raise ShapeError(
                f"model shape {self.name!r}: expected at most {_ALL_EXPERTS:,} experts in all layers together, of one "
                f"byte or more each, and at most {_MOST_BYTES:.0e} bytes of weights, got {experts:,} experts and "
                f"{size:,} bytes, {self.routed_bytes:,} of them in experts"
            )

    def _faults(self) -> Iterator[str]:
        if self.top_k > self.experts:
            yield f"top_k {self.top_k} exceeds the {self.experts} experts"
        entries = f"needs an entry for each of the {self.moe_layers} MoE layers, got"
        if self.expert_bytes and len(self.expert_bytes) != self.moe_layers:
            yield f"expert_bytes {entries} {len(self.expert_bytes)}"
        if self.moe_blocks is not None and len(self.moe_blocks) < self.moe_layers:
            yield f"moe_blocks {entries} {len(self.moe_blocks)}"

    def _attention_faults(self) -> Iterator[str]:
        """Faults of layers that have none of the kinds of attention, and of kinds that have no meaning."""
        kinds, layers = self.attention or (), self.attention_layers or ()
        if (bool(kinds), len(layers)) not in ((False, 0), (True, self.layers)) or len(kinds) > self.layers:
            yield (
                f"attention_layers needs an entry for each of the {self.layers} layers where attention lists kinds, "
                f"and none where it does not; got {len(layers)} for {len(kinds)} kinds"
            )
        if not all(0 <= kind < len(kinds) for kind in layers):
            yield f"attention_layers must be numbers of the {len(kinds)} kinds in attention, counted from 0"
        for number, kind in enumerate(kinds):
            if (kind.reach in ("window", "chunk")) != (kind.span > 0):
                yield (
                    f"attention[{number}] must have a span, in tokens, if it reaches over a window or chunk, and none "
                    f"otherwise; got reach {kind.reach!r} with span {kind.span}"
                )

    @property
    def base_name(self) -> str:
        """The name of the model that this one is cut from (``NAME:N``), or its own."""
        return str(parted(self.name)._replace(layers=None))

    @property
    def layers(self) -> int:
        """All layers, dense ones included."""
        return self.moe_layers + self.dense_layers

    @cached_property
    def expert_blocks(self) -> tuple[int, ...]:
        """The number of each MoE layer among the blocks of the model's file: after the dense layers, where these are
        not between them."""
        return (self.moe_blocks or tuple(range(self.dense_layers, self.layers)))[: self.moe_layers]

    @cached_property
    def attention_counts(self) -> tuple[tuple[Attention, int], ...]:
        """The kinds of attention, and the number of layers of each."""
        if self.attention is None or self.attention_layers is None:
            own = Attention("full", self.attention_params, self.heads, self.head_dim, self.kv_width)
            return ((own, self.layers),)
        return tuple((kind, self.attention_layers.count(number)) for number, kind in enumerate(self.attention))

    def mean_of_layers(self, of: Callable[[Attention], float]) -> float:
        """A quantity of a layer that depends on its attention, in the mean over all layers."""
        return sum(of(kind) * layers for kind, layers in self.attention_counts) / self.layers

    def first_layers(self, count: int) -> ModelShape:
        """The model cut after its first ``count`` MoE layers, named ``NAME:count``."""
        kept: dict[str, Any] = {
            "name": f"{self.name}:{count}", "moe_layers": count, "expert_bytes": self.expert_bytes[:count]
        }
        if self.attention is not None and self.attention_layers is not None:
            numbers = self.attention_layers[: self.dense_layers + count]
            used = sorted(set(numbers))
            kept["attention"] = tuple(self.attention[number] for number in used)
            kept["attention_layers"] = tuple(map(used.index, numbers))
        return replace(self, **kept)

    @cached_property
    def expert_bytes_by_layer(self) -> tuple[int, ...]:
        """Bytes of one routed expert of each MoE layer."""
        uniform = round(self.matrices_per_expert * self.hidden * self.expert_width * self.weight_bits / 8)
        return self.expert_bytes or (uniform,) * self.moe_layers

    @property
    def largest_expert_tensor_bytes(self) -> int:
        """Bytes of the largest tensor that holds a matrix of all experts of a layer, as in GGUF files. Where it is not
        known, one of average size: gate and up are taken for separate, and as large as down."""
        largest = max(self.expert_bytes_by_layer) * self.experts
        return self.expert_tensor_bytes or largest // self.matrices_per_expert

    @cached_property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(self.expert_bytes_by_layer) * self.experts

    @property
    def least_host_bytes(self) -> int:
        """Bytes of the experts of a layer and two buffers: the least of the host's memory above a disk."""
        return (self.experts + 2) * max(self.expert_bytes_by_layer)

    @property
    def shared_params(self) -> int:
        """Weights of the shared experts of one layer."""
        return self.matrices_per_expert * self.hidden * self.shared_width

    @property
    def dense_ffn_params(self) -> int:
        """Weights of the feed-forward part of one dense layer."""
        return self.matrices_per_expert * self.hidden * self.dense_width

    @property
    def non_expert_params(self) -> int:
        """Weights outside the routed experts: attention, gates, shared experts, dense layers, embeddings."""
        return sum(self.part_params.values())

    @property
    def params(self) -> int:
        """All weights but those of norms and biases."""
        expert = self.matrices_per_expert * self.hidden * self.expert_width
        return self.moe_layers * self.experts * expert + self.non_expert_params

    @cached_property
    def bits(self) -> PartBits:
        """Bits per weight of the parts outside the routed experts."""
        return self.part_bits or PartBits.uniform(self.dense_bits)

    @cached_property
    def part_params(self) -> Mapping[str, int]:
        """Weights of each part of ``PartBits``; a tied table of embeddings is the head's."""
        table = self.vocab * self.hidden
        kinds = [(kind.params * layers, kind.reach == "state") for kind, layers in self.attention_counts]
        return {
            "attention": sum(params for params, state in kinds if not state),
            "state": sum(params for params, state in kinds if state),
            "router": self.moe_layers * self.hidden * self.experts,
            "shared": self.moe_layers * self.shared_params,
            "dense": self.dense_layers * self.dense_ffn_params,
            "embedding": 0 if self.tied_embeddings else table,
            "head": table,
        }

    @cached_property
    def non_expert_bytes(self) -> int:
        """Bytes of everything that is always on the GPU: all weights but the routed experts'."""
        return round(self.non_expert_params * self.dense_bits / 8)

    @property
    def moe_layer_bytes(self) -> int:
        """Bytes of a mean MoE layer with all of its experts."""
        bits = self.bits
        attention = self.mean_of_layers(lambda kind: kind.params * bits.of_attention(kind))
        others = attention + self.hidden * self.experts * bits.router + self.shared_params * bits.shared
        return round(others / 8 + self.routed_bytes / self.moe_layers)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the table of embeddings, of which a token reads one row."""
        return round(self.vocab * self.hidden * self.bits.embedding / 8)

    @property
    def product_params(self) -> int:
        """Weights outside the routed experts that every token is multiplied with: all but the table of embeddings,
        unless that is the head too."""
        return self.non_expert_params - (0 if self.tied_embeddings else self.vocab * self.hidden)

    @property
    def product_bytes(self) -> int:
        """Bytes of ``product_params``, with what comes along: norms and biases, where a file's bytes are known."""
        return self.non_expert_bytes - (0 if self.tied_embeddings else self.embedding_bytes)

    @property
    def cache_bits(self) -> float:
        """Bits per element of the KV cache."""
        return self.dense_bits if self.kv_bits is None else self.kv_bits

    def cache_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of ``tokens`` keeps over all layers: keys and values, and states."""
        kinds = self.attention_counts
        return round(sum(kind.cache_bytes(tokens, self.cache_bits) * layers for kind, layers in kinds))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ``from_dict`` is its inverse.

        What is None is left out: the checksums of traces written before there was such a field stay as they were.
        """
        return to_dict(self, nulls=False)

    @classmethod
    def from_dict(cls, values: object) -> ModelShape:
        """Build a shape from ``to_dict`` output. Raises ShapeError."""
        return from_dict(cls, values, "model shape", ShapeError)


@dataclass(frozen=True)
class ExpertWork:
    """Work of a layer's experts in a step, in the mean: how many are ``active``, with how many ``rows`` each."""

    active: float
    rows: float

    @classmethod
    def of(cls, shape: ModelShape, tokens: int) -> ExpertWork:
        """The work for ``tokens`` that choose independently, if all experts are equally popular."""
        active = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
        return cls(active, max(tokens * shape.top_k / active, 1.0))

    @property
    def most_rows(self) -> int:
        """The next whole number of rows."""
        return math.ceil(self.rows)

    def ns(self, table: Sequence[int]) -> float:
        """Time of all active experts, by the time of one with each number of rows."""
        fewer = math.floor(self.rows)
        more_share = self.rows - fewer
        return self.active * ((1 - more_share) * table[fewer] + more_share * table[self.most_rows])
