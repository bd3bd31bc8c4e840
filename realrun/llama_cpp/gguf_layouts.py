"""Keys and tensors of the GGUF files of some MoE families, for a model of any size.

Names and shapes are those that llama.cpp loads (ggml-org/llama.cpp src/models/qwen3moe.cpp, olmoe.cpp, openai-moe.cpp,
deepseek2.cpp). Files have no tokens: with the tokenizer model "none" llama.cpp takes their number from the vocabulary's
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal, NamedTuple

from traces.models.shape import ModelShape, ShapeError
from trilane.common.names import unknown

Value = int | float | str | bool
Part = Literal["gate_up", "down", "layers", "embedding", "head", "f32"]  # of a format's blocks; f32: 32-bit floats
CONTEXT_TOKENS = 131_072
_EPSILON, _ROPE_BASE = 1e-6, 1e6
_ROTARY = 64  # of DeepSeek's heads, the widths with a position


class TensorLayout(NamedTuple):
    """A tensor: its shape with the row's length first, as ggml counts, and what it is filled with."""

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int = 0
    constant: float | None = None  # None: random weights


class GgufLayout(NamedTuple):
    """All of a file but its weights, and the name of the architecture."""

    metadata: Mapping[str, Value]
    tensors: tuple[TensorLayout, ...]


def gguf_layout(shape: ModelShape, architecture: str) -> GgufLayout:
    """The file of a model of an architecture of llama.cpp. Raises ShapeError for a family that is not known here."""
    if architecture not in _FAMILIES:
        raise ShapeError(unknown("architecture of random models", architecture, _FAMILIES))
    family = _FAMILIES[architecture]
    keys = {**_sizes(shape), **family.keys(shape)}
    metadata: dict[str, Value] = {
        "general.name": f"random weights: {shape.name}",
        **{f"{architecture}.{key}": value for key, value in keys.items()}, "tokenizer.ggml.model": "none",
    }
    return GgufLayout(metadata, tuple(_tensors(shape, family)))


class _Family(NamedTuple):
    keys: Callable[[ModelShape], dict[str, Value]]
    attention: Callable[[ModelShape], Iterator[TensorLayout]]
    ffn_norm: str = "ffn_norm"
    biases: bool = False


def _sizes(shape: ModelShape) -> dict[str, Value]:
    return {
        "block_count": shape.layers, "context_length": CONTEXT_TOKENS, "embedding_length": shape.hidden,
        "vocab_size": shape.vocab, "expert_count": shape.experts, "expert_used_count": shape.top_k,
        "expert_feed_forward_length": shape.expert_width, "attention.head_count": shape.heads,
        "attention.layer_norm_rms_epsilon": _EPSILON, "rope.freq_base": _ROPE_BASE,
        "feed_forward_length": shape.dense_width or shape.expert_width,
    }


def _grouped_keys(shape: ModelShape) -> dict[str, Value]:
    lengths = {f"attention.{which}_length": shape.head_dim for which in ("key", "value")}
    return {"attention.head_count_kv": shape.kv_heads, **lengths}


def _windowed_keys(shape: ModelShape) -> dict[str, Value]:
    window = next((kind.span for kind in shape.attention or () if kind.reach == "window"), 128)
    return {**_grouped_keys(shape), "attention.sliding_window": window}


def _latent_keys(shape: ModelShape) -> dict[str, Value]:
    rank = shape.kv_width - _ROTARY
    return {
        "attention.head_count_kv": 1, "leading_dense_block_count": shape.dense_layers, "attention.q_lora_rank": 0,
        "attention.kv_lora_rank": rank, "attention.key_length": shape.kv_width, "attention.value_length": rank,
        "attention.key_length_mla": shape.head_dim, "attention.value_length_mla": shape.head_dim - _ROTARY,
        "rope.dimension_count": _ROTARY, "expert_shared_count": shape.shared_experts, "expert_weights_scale": 1.0,
        "expert_weights_norm": shape.norm_topk,
    }


def _grouped(shape: ModelShape) -> Iterator[TensorLayout]:
    """Queries, keys and values in groups."""
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for name, width in (("q", wide), ("k", narrow), ("v", narrow)):
        yield TensorLayout(f"attn_{name}.weight", (shape.hidden, width), "layers")
    yield TensorLayout("attn_output.weight", (wide, shape.hidden), "layers")


def _normed(shape: ModelShape, over_all_heads: bool) -> Iterator[TensorLayout]:
    """With a norm over each head, or over all of them."""
    yield from _grouped(shape)
    for name, heads in (("q", shape.heads), ("k", shape.kv_heads)):
        yield _norm(f"attn_{name}_norm", shape.head_dim * (heads if over_all_heads else 1))


def _with_sinks(shape: ModelShape) -> Iterator[TensorLayout]:
    """gpt-oss: biases, and a sink for each head."""
    for tensor in _grouped(shape):
        yield tensor
        yield TensorLayout(tensor.name.replace("weight", "bias"), tensor.shape[1:], "f32", constant=0.0)
    yield TensorLayout("attn_sinks.weight", (shape.heads,), "f32", constant=0.0)


def _latent(shape: ModelShape) -> Iterator[TensorLayout]:
    """DeepSeek-V2-Lite: a latent that all heads share; queries are not compressed."""
    rank, plain, heads = shape.kv_width - _ROTARY, shape.head_dim - _ROTARY, shape.heads
    yield TensorLayout("attn_q.weight", (shape.hidden, heads * shape.head_dim), "layers")
    yield TensorLayout("attn_kv_a_mqa.weight", (shape.hidden, shape.kv_width), "layers")
    yield _norm("attn_kv_a_norm", rank)
    yield TensorLayout("attn_k_b.weight", (plain, rank, heads), "layers")
    yield TensorLayout("attn_v_b.weight", (rank, plain, heads), "layers")
    yield TensorLayout("attn_output.weight", (heads * plain, shape.hidden), "layers")


def _tensors(shape: ModelShape, family: _Family) -> Iterator[TensorLayout]:
    yield TensorLayout("token_embd.weight", (shape.hidden, shape.vocab), "embedding")
    for layer in range(shape.layers):
        dense = layer < shape.dense_layers
        parts = (
            (_norm("attn_norm", shape.hidden), _norm(family.ffn_norm, shape.hidden)), family.attention(shape),
            _feed_forward("", shape, shape.dense_width) if dense else _mixture(shape, family.biases),
        )
        for tensor in (tensor for part in parts for tensor in part):
            yield tensor._replace(name=f"blk.{layer}.{tensor.name}", layer=max(layer - shape.dense_layers, 0))
    yield _norm("output_norm", shape.hidden)
    if not shape.tied_embeddings:
        yield TensorLayout("output.weight", (shape.hidden, shape.vocab), "head")


def _mixture(shape: ModelShape, biases: bool) -> Iterator[TensorLayout]:
    """The router, the routed experts and the shared ones."""
    hidden, width, count = shape.hidden, shape.expert_width, shape.experts
    yield TensorLayout("ffn_gate_inp.weight", (hidden, count), "f32")
    yield TensorLayout("ffn_gate_exps.weight", (hidden, width, count), "gate_up")
    yield TensorLayout("ffn_up_exps.weight", (hidden, width, count), "gate_up")
    yield TensorLayout("ffn_down_exps.weight", (width, hidden, count), "down")
    if shape.shared_width:
        yield from _feed_forward("_shexp", shape, shape.shared_width)
    if biases:
        yield TensorLayout("ffn_gate_inp.bias", (count,), "f32", constant=0.0)
        for name, size in (("gate", width), ("up", width), ("down", hidden)):
            yield TensorLayout(f"ffn_{name}_exps.bias", (size, count), "f32", constant=0.0)


def _feed_forward(suffix: str, shape: ModelShape, width: int) -> Iterator[TensorLayout]:
    for name in ("gate", "up"):
        yield TensorLayout(f"ffn_{name}{suffix}.weight", (shape.hidden, width), "layers")
    yield TensorLayout(f"ffn_down{suffix}.weight", (width, shape.hidden), "layers")


def _norm(name: str, width: int) -> TensorLayout:
    return TensorLayout(f"{name}.weight", (width,), "f32", constant=1.0)


_FAMILIES = {
    "qwen3moe": _Family(_grouped_keys, partial(_normed, over_all_heads=False)),
    "olmoe": _Family(_grouped_keys, partial(_normed, over_all_heads=True)),
    "gpt-oss": _Family(_windowed_keys, _with_sinks, ffn_norm="post_attention_norm", biases=True),
    "deepseek2": _Family(_latent_keys, _latent),
}
