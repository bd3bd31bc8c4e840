"""What llama.cpp allocates when it loads a model: weights, KV cache and compute buffers, on the GPU and on the host.

Source: ggml-org/llama.cpp build 11549, src/llama-kv-cache*.cpp and src/llama-graph.cpp. Buffers of eight families were
asked of that build itself (docs/validation/load-memory.md): the formulas are read from its graphs, not fitted.

KV cache. A layer that attends to everything has a cell for each token of the context, in whole 256. A layer with a
window has cells for the window and for one piece of a prompt, in whole 256, but no more than the others.

Compute buffers hold the intermediate results of one piece of a prompt, in 32 bits, and are as large as the largest
moment of it. At any moment there are the inputs: four rows of hidden states (embeddings that are given, those that are
looked up, and both mixed) and, for each kind of cache, a mask, in 16 bits with flash attention and 32 without, and
without it the 64-bit places of each value. Next to these there are, at the largest moments,

- the logits of all tokens of the piece;
- without flash attention, the scores of all heads with all cells, next to the queries and the outputs;
- an expert layer's two products and what is made of them, each of all chosen experts; or, where experts are copied to
  the GPU, one matrix of all of a layer's experts, with the results before and after it.

The table of embeddings stays on the host. A machine without a GPU has one more row of hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from traces.models.attention import Attention
from traces.models.shape import ModelShape

RESULT_BYTES = 4
_CELLS = 256  # of a cache, rounded up
_INPUT_ROWS = 4  # of hidden states
_PLACE_BYTES = 8

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
    sizes = [shape.expert_bytes_of(layer) * shape.experts for layer in range(shape.moe_layers)]
    all_bytes = shape.non_expert_bytes + shape.routed_bytes
    table = shape.embedding_bytes
    host = table + sum(sizes[: setting.cpu_layers]) if setting.gpu else 0
    on_gpu = all_bytes - host + (table if setting.gpu and shape.tied_embeddings else 0)
    inputs = _inputs_bytes(shape, setting)
    return LoadMemory(
        weights_bytes=on_gpu,
        kv_bytes=kv_cache_bytes(shape, setting),
        compute_bytes=compute_buffer_bytes(shape, setting),
        host_weights_bytes=host,
        host_compute_bytes=inputs if setting.gpu else 0,
    )


def kv_cache_bytes(shape: ModelShape, setting: LoadSetting) -> int:
    """Bytes of keys, values and states of all sequences."""
    element_bytes, one = shape.cache_bits / 8, 0.0
    for kind, layers in shape.attention_counts:
        elements = setting.cells_of(kind) * _cached_width(shape, kind, setting)
        one += layers * (elements * element_bytes + kind.state_bytes)
    return setting.sequences * round(one)


def compute_buffer_bytes(shape: ModelShape, setting: LoadSetting) -> int:
    """Bytes of the largest moment of a piece of a prompt."""
    moments = [shape.vocab * RESULT_BYTES * setting.piece_tokens, _experts_bytes(shape, setting)]
    if not setting.flash_attention:
        moments += [_scores_bytes(kind, setting) for kind, _ in shape.attention_counts]
    row = 0 if setting.gpu else shape.hidden * RESULT_BYTES * setting.piece_tokens
    return _inputs_bytes(shape, setting) + max(moments) + row


def _inputs_bytes(shape: ModelShape, setting: LoadSetting) -> int:
    cells = {kind.span: setting.cells_of(kind) for kind, _ in shape.attention_counts if kind.reach != "state"}
    mask = sum(cells.values()) * (2 if setting.flash_attention else 4)
    places = 0 if setting.flash_attention else len(cells) * _widest_values(shape) * _PLACE_BYTES
    return (shape.hidden * _INPUT_ROWS * RESULT_BYTES + mask + places) * setting.piece_tokens


def _cached_width(shape: ModelShape, kind: Attention, setting: LoadSetting) -> int:
    """Elements of a token's keys and values. Without flash attention all layers' values are as wide as the widest."""
    own = _values_width(kind)
    return kind.kv_width if setting.flash_attention or not own else kind.kv_width - own + _widest_values(shape)


def _widest_values(shape: ModelShape) -> int:
    return max(_values_width(kind) for kind, _ in shape.attention_counts)


def _values_width(kind: Attention) -> int:
    """Elements of a token's values; a latent cache has none of their own."""
    return 0 if kind.latent else kind.kv_width // 2


def _scores_bytes(kind: Attention, setting: LoadSetting) -> int:
    """Scores of all heads, queries and outputs. A latent's are as wide as the cache, which is turned too; that counts
    where it is larger than both of them, otherwise there is room among what is free again."""
    wide = kind.kv_width if kind.latent else kind.head_dim
    queries = kind.heads * wide * RESULT_BYTES * setting.piece_tokens
    turned = setting.cells_of(kind) * wide * 2 if kind.latent else 0
    scores = kind.heads * setting.cells_of(kind) * RESULT_BYTES * setting.piece_tokens
    return scores + 2 * queries + (turned if turned > 2 * queries else 0)


def _experts_bytes(shape: ModelShape, setting: LoadSetting) -> int:
    """Results of a layer's experts, next to the weights that are copied for it."""
    token = shape.top_k * RESULT_BYTES * setting.piece_tokens
    computed = token * shape.matrices_per_expert * shape.expert_width
    if setting.copied == "nothing" or not setting.cpu_layers:
        return computed
    layer = max(shape.expert_bytes_of(each) for each in range(setting.cpu_layers)) * shape.experts
    copied = shape.largest_expert_tensor_bytes if setting.copied == "matrix" else layer
    return max(computed, copied + token * (shape.expert_width + max(shape.expert_width, shape.hidden)))


def _padded(tokens: int) -> int:
    return -(-tokens // _CELLS) * _CELLS
