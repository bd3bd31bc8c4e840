"""Memory that llama.cpp allocates for a model, on the GPU and on the host: weights, KV cache and compute buffers.

Source: ggml-org/llama.cpp build 11549, src/llama-kv-cache*.cpp and llama-graph.cpp, ggml/src/ggml-alloc.c and
ggml-backend.cpp. Buffers of eight families were asked of that build itself (docs/validation/load-memory.md): the
formulas are read from its graphs, not fitted.

KV cache. A layer that attends to everything has a cell for each token of the context, in whole 256. A layer with a
window has cells for the window and for one piece of a prompt, in whole 256, but no more than the others.

The table of embeddings stays on the host.

Compute buffers hold the intermediate results of one piece of a prompt, and are as large as the largest moment of it.
Results have 32 bits. At any moment there are the inputs: four rows of hidden states (embeddings that are given, those
that are looked up, and both mixed) and, for each kind of cache, a mask, in 16 bits with flash attention and 32 without,
and without it the 64-bit places of each value. Next to these there are, at the largest moments,

- the logits of all tokens of the piece;
- without flash attention, the scores of all heads with all cells, next to the queries and the outputs;
- an expert layer's two products and what is made of them, each of all chosen experts; or, where experts are copied to
  the GPU, one matrix of all of a layer's experts, with the results before and after it.

Where experts are copied, the graph is cut before each copy (ggml_backend_sched_split_graph), and what a part reads from
the host comes to the GPU when the part begins. So the mask of a cache that no layer up to the first experts uses is
there only later, and behind the last layer no longer. It lies above the matrix that was copied with it, unless it has
room in the place of a row of hidden states. The place of that matrix is a hole afterwards: small results go there, the
next matrices and the scores of a long context do not. (Experts with biases are cut there, too: the mask then takes the
matrix' own place.)

A machine without a GPU has one more row of hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from traces.models.attention import Attention
from traces.models.shape import ModelShape

RESULT_BYTES = 4
_INPUT_ROWS = 4  # of hidden states
_PLACE_BYTES = 8
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
    output: bool = True  # the head is on this GPU

    @property
    def copies(self) -> bool:
        """True if experts are copied to the GPU for prompts."""
        return self.copied != "nothing" and self.cpu_layers > 0 and self.gpu

    @property
    def piece_tokens(self) -> int:
        """Tokens of a piece of a prompt."""
        return min(self.ubatch_tokens, self.cells)

    @cached_property
    def cells(self) -> int:
        """Cells of a sequence, in the cache of a layer that attends to everything."""
        return _padded(-(-self.context_tokens // self.sequences))

    def cells_of(self, kind: Attention) -> int:
        """Cells of a sequence, in the cache of a layer of this kind."""
        if kind.reach == "state":
            return 0
        return self.cells if kind.reach == "full" else min(self.cells, _padded(kind.span + self.ubatch_tokens))


@dataclass(frozen=True)
class ComputeBuffer:
    """Results in the buffer while one piece of a prompt is computed; sizes in bytes."""

    shape: ModelShape
    setting: LoadSetting

    @property
    def size(self) -> int:
        """The largest moment."""
        products = self._slots(self.shape.matrices_per_expert * self.shape.expert_width)
        moments = [self._row(self.shape.vocab) * self.setting.output, self._late + products, *self._copies]
        if not self.setting.flash_attention:
            for kind, _ in self.shape.attention_counts:
                moments += [self._late + self._scores(kind), self._late + self._scores_above_hole(kind)]
        row = 0 if self.setting.gpu else self._row(self.shape.hidden)
        return self.inputs - self._late + max(moments) + row

    @property
    def inputs(self) -> int:
        """Hidden states, and the masks of all caches."""
        return self._row(_INPUT_ROWS * self.shape.hidden) + sum(self._masks.values())

    def _row(self, elements: int) -> int:
        """Results of so many elements a token."""
        return elements * RESULT_BYTES * self.setting.piece_tokens

    def _slots(self, elements: int) -> int:
        """Results of so many elements for each expert that a token chooses."""
        return self._row(self.shape.top_k * elements)

    @cached_property
    def _caches(self) -> dict[int, tuple[int, ...]]:
        return _caches_of(self.shape)

    @cached_property
    def _masks(self) -> dict[int, int]:
        """Bytes of each cache's mask."""
        return {span: self._mask(span) for span in self._caches}

    def _mask(self, span: int) -> int:
        """The mask of a cache, and the places of each value in it."""
        cells = next(self.setting.cells_of(kind) for kind, _ in self.shape.attention_counts if _is(kind, span))
        flash = self.setting.flash_attention
        places = 0 if flash else widest_values(self.shape) * _PLACE_BYTES
        return (cells * (2 if flash else 4) + places) * self.setting.piece_tokens

    def _late_since(self, block: int) -> int:
        """Masks that come to the GPU behind the first experts, and before those of a block."""
        if not self.setting.copies:
            return 0
        since = range(self.shape.expert_blocks[0] + 1, block + 1)
        return sum(self._masks[span] for span, layers in self._caches.items() if layers[0] in since)

    @property
    def _late(self) -> int:
        """All masks that come behind the first experts."""
        return self._late_since(self.shape.layers)

    @property
    def _matrices(self) -> tuple[int, int]:
        """Bytes of all experts of a layer: matrices copied first, which may be gate and up in one, and last, down."""
        layer = max(self.shape.expert_bytes_by_layer[: self.setting.cpu_layers]) * self.shape.experts
        largest = layer if self.setting.copied == "layer" else self.shape.largest_expert_tensor_bytes
        return largest, layer - largest if layer < 2 * largest < 2 * layer else largest

    @property
    def _copies(self) -> list[int]:
        """Bytes of matrices that are copied, with the results before and after them."""
        if not self.setting.copies:
            return []
        (first, down), width = self._matrices, self.shape.expert_width
        masks = self._late_since(self.shape.expert_blocks[self.setting.cpu_layers - 1])
        return [
            masks + first + self._slots(2 * width), self._late + down + self._slots(width + self.shape.hidden),
            masks + self._hole + first + self._slots(width) if self._copies_above_hole else 0,
        ]

    @property
    def _copies_above_hole(self) -> bool:
        """True if a matrix is copied while a mask lies above the hole, which does not take it: in the layer that the
        mask came for, one of its size fits, unless scores are there."""
        first, down = self._matrices
        near = 0 if first > down or not self.setting.flash_attention else 1
        blocks = self.shape.expert_blocks[: self.setting.cpu_layers]
        late = [layers for layers in self._caches.values() if layers[0] > blocks[0]]
        return any(layers[0] + near <= block < layers[-1] for layers in late for block in blocks)

    @property
    def _hole(self) -> int:
        """The place of the matrix below the masks that come late."""
        room = self._row(self.shape.hidden) // 2 if self.setting.flash_attention else 0  # half: some are in use
        return self._matrices[1] if self._late > room and not self.shape.expert_biases else 0

    def _scores_above_hole(self, kind: Attention) -> int:
        """Bytes of scores whose mask comes late, with hole and queries; 0 where they fit into the hole."""
        scores = self._row(kind.heads * self.setting.cells_of(kind))
        return self._hole + scores + self._row(kind.heads * kind.head_dim) if scores > self._hole > 0 else 0

    def _scores(self, kind: Attention) -> int:
        """Scores of all heads, queries and outputs. A latent's are as wide as the cache, which is turned too; that
        counts where it is larger than both of them, otherwise there is room among what is free again."""
        wide = kind.kv_width if kind.latent else kind.head_dim
        queries, cells = self._row(kind.heads * wide), self.setting.cells_of(kind)
        turned, scores = cells * wide * 2 if kind.latent else 0, self._row(kind.heads * cells)
        return scores + 2 * queries + (turned if turned > 2 * queries else 0)


@lru_cache(maxsize=8)
def _caches_of(shape: ModelShape) -> dict[int, tuple[int, ...]]:
    """The layers that use each cache, by their span."""
    kinds = [kind for kind, _ in shape.attention_counts]
    of_layer = [kinds[number] for number in shape.attention_layers or (0,) * shape.layers]
    spans = {kind.span for kind in kinds if kind.reach != "state"}
    return {span: tuple(layer for layer, kind in enumerate(of_layer) if _is(kind, span)) for span in sorted(spans)}


def widest_values(shape: ModelShape) -> int:
    """Elements of a token's values, in the layers with the widest."""
    return max(values_width(kind) for kind, _ in shape.attention_counts)


def values_width(kind: Attention) -> int:
    """Elements of a token's values; a latent cache has none of their own."""
    return 0 if kind.latent else kind.kv_width // 2


def _is(kind: Attention, span: int) -> bool:
    """True if layers of a kind use the cache of a span."""
    return kind.reach != "state" and kind.span == span


def _padded(tokens: int) -> int:
    return -(-tokens // _CELLS) * _CELLS


@dataclass(frozen=True)
class LoadMemory:
    """Bytes. Without a GPU everything is in the host's memory, and named here as if that were the GPU's."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    host_weights_bytes: int  # table of embeddings, experts
    host_compute_bytes: int  # inputs

    @property
    def gpu_bytes(self) -> int:
        """All on the GPU."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes


def load_memory(shape: ModelShape, setting: LoadSetting) -> LoadMemory:
    """The memory of a model with this setting; ``shape`` has the format of its cache."""
    experts = sum(shape.expert_bytes_by_layer[: setting.cpu_layers]) * shape.experts
    table = shape.embedding_bytes
    host = table + experts if setting.gpu else 0
    twice = table if setting.gpu and shape.tied_embeddings else 0
    buffer = ComputeBuffer(shape, setting)
    return LoadMemory(
        weights_bytes=shape.non_expert_bytes + shape.routed_bytes - host + twice,
        kv_bytes=kv_cache_bytes(shape, setting),
        compute_bytes=buffer.size,
        host_weights_bytes=host,
        host_compute_bytes=buffer.inputs if setting.gpu else 0,
    )


def kv_cache_bytes(shape: ModelShape, setting: LoadSetting) -> int:
    """Bytes of keys, values and states of all sequences."""
    one = sum(layers * layer_cache_bytes(shape, kind, setting) for kind, layers in shape.attention_counts)
    return setting.sequences * round(one)


def layer_cache_bytes(shape: ModelShape, kind: Attention, setting: LoadSetting) -> float:
    """Bytes of one sequence's keys, values and state in one layer."""
    elements = setting.cells_of(kind) * _cached_width(shape, kind, setting)
    return elements * shape.cache_bits / 8 + kind.state_bytes


def _cached_width(shape: ModelShape, kind: Attention, setting: LoadSetting) -> int:
    """Elements of a token's keys and values. Without flash attention all layers' values are as wide as the widest."""
    own = values_width(kind)
    return kind.kv_width if setting.flash_attention or not own else kind.kv_width - own + widest_values(shape)
