"""GGUF files of random weights: models of some MoE families, of any size, in a format of llama.cpp.

Names and shapes are those that llama.cpp loads (ggml-org/llama.cpp src/models/qwen3moe.cpp, olmoe.cpp, openai-moe.cpp,
deepseek2.cpp). Files have no tokens: with the tokenizer model "none" llama.cpp takes their number from the vocabulary's
size. Weights are random bits in the blocks of a format (ggml/src/ggml-common.h), with scales for mean 0 and a given
standard deviation.

A few random blocks are repeated, so that the content is made in no time, while every byte of the file has its own
address. Their number is odd and prime: experts, which have an even number of blocks, do not repeat each other. Routers
are random throughout, and every expert is about as likely as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from traces.models.quantisation import WeightBlocks, block_of_row
from traces.models.shape import ModelShape, ShapeError
from trilane.common.files import atomic_path
from trilane.common.names import unknown

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter


Value = int | float | str | bool
# Of a format's blocks; f32: 32-bit floats.
Part = Literal["gate_up", "down", "attention", "shared", "dense", "embedding", "head", "f32"]
CONTEXT_TOKENS = 131_072
_EPSILON, _ROPE_BASE = 1e-6, 1e6
_ROTARY = 64  # of DeepSeek's heads, the widths with a position


class TensorLayout(NamedTuple):
    """A tensor: its shape with the row's length first, as in ggml, and its content."""

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int = 0
    constant: float | None = None  # None: random weights


class GgufLayout(NamedTuple):
    """A file without its weights."""

    metadata: Mapping[str, Value]
    tensors: tuple[TensorLayout, ...]


def gguf_layout(shape: ModelShape, architecture: str) -> GgufLayout:
    """Layout of the file of a model. Raises ShapeError for an architecture of llama.cpp that is not known here."""
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
        yield TensorLayout(f"attn_{name}.weight", (shape.hidden, width), "attention")
    yield TensorLayout("attn_output.weight", (wide, shape.hidden), "attention")


def _normed(shape: ModelShape, over_all_heads: bool) -> Iterator[TensorLayout]:
    """Grouped attention with a norm over each head, or over all of them."""
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
    yield TensorLayout("attn_q.weight", (shape.hidden, heads * shape.head_dim), "attention")
    yield TensorLayout("attn_kv_a_mqa.weight", (shape.hidden, shape.kv_width), "attention")
    yield _norm("attn_kv_a_norm", rank)
    yield TensorLayout("attn_k_b.weight", (plain, rank, heads), "attention")
    yield TensorLayout("attn_v_b.weight", (rank, plain, heads), "attention")
    yield TensorLayout("attn_output.weight", (heads * plain, shape.hidden), "attention")


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
    part: Part = "shared" if suffix else "dense"
    for name in ("gate", "up"):
        yield TensorLayout(f"ffn_{name}{suffix}.weight", (shape.hidden, width), part)
    yield TensorLayout(f"ffn_down{suffix}.weight", (width, shape.hidden), part)


def _norm(name: str, width: int) -> TensorLayout:
    return TensorLayout(f"{name}.weight", (width,), "f32", constant=1.0)


_FAMILIES = {
    "qwen3moe": _Family(_grouped_keys, partial(_normed, over_all_heads=False)),
    "olmoe": _Family(_grouped_keys, partial(_normed, over_all_heads=True)),
    "gpt-oss": _Family(_windowed_keys, _with_sinks, ffn_norm="post_attention_norm", biases=True),
    "deepseek2": _Family(_latent_keys, _latent),
}


Bytes = npt.NDArray[np.uint8]


def random_blocks(name: str, count: int, std: float, random: np.random.Generator) -> Bytes:
    """``count`` random blocks [count, bytes] of a format, or elements of f32, f16 and bf16.

    Raises ShapeError for a format that is not known here.
    """
    _, _, size_bytes = block_format(name)
    if name == "f32":
        return (random.standard_normal(count, np.float32) * np.float32(std)).view(np.uint8).reshape(count, 4)
    if name == "bf16":
        high = (random.standard_normal(count, np.float32) * np.float32(std)).view(np.uint16)[1::2]
        return high.copy().view(np.uint8).reshape(count, 2)
    blocks = np.frombuffer(random.bytes(count * size_bytes), np.uint8).reshape(count, -1).copy()
    _SCALES[name](blocks, std)
    return blocks


def block_format(name: str) -> tuple[GGMLQuantizationType, int, int]:
    """The type of this name, and the weights and bytes of its blocks. Raises ShapeError."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if name not in _SCALES:
        raise ShapeError(unknown("block of random weights", name, _SCALES))
    kind = GGMLQuantizationType[name.upper()]
    return kind, *GGML_QUANT_SIZES[kind]


def _at(place: int, unit: float) -> Callable[[Bytes, float], None]:
    """A 16-bit scale at ``place``; ``unit``: the standard deviation of what it multiplies."""

    def scale(blocks: Bytes, std: float) -> None:
        blocks[:, place : place + 2] = np.frombuffer(np.float16(std / unit).tobytes(), np.uint8)

    return scale


def _k_scales(mean: float, unit: float) -> Callable[[Bytes, float], None]:
    """A scale, and one of the minima, which are subtracted, at the start; ``mean``: of the quants."""

    def scale(blocks: Bytes, std: float) -> None:
        both = np.array([std / unit, mean * std / unit], np.float16)
        blocks[:, :4] = np.frombuffer(both.tobytes(), np.uint8)

    return scale


def _power_of_two(blocks: Bytes, std: float) -> None:
    """MXFP4: an exponent in front of eight magnitudes, 0 to 6, of root mean square 2.93."""
    blocks[:, 0] = round(127 + math.log2(std / 2.93))


def _plain(blocks: Bytes, std: float) -> None:
    """Nothing to set."""


_SCALES_VARIANCE = (64**2 - 1) / 12  # of six random bits, whose mean is 31.5


def _k_unit(levels: int) -> float:
    """Standard deviation of scale x quant - mean of the quants x minimum, scales and minima of six random bits."""
    mean, variance = (levels - 1) / 2, (levels**2 - 1) / 12
    product = (_SCALES_VARIANCE + 31.5**2) * (variance + mean**2) - (31.5 * mean) ** 2
    return math.sqrt(product + mean**2 * _SCALES_VARIANCE)


_INT8 = math.sqrt((256**2 - 1) / 12)
_SCALES: Mapping[str, Callable[[Bytes, float], None]] = {  # write scales into random blocks, for a standard deviation
    "f32": _plain,
    "bf16": _plain,
    "q4_0": _at(0, math.sqrt((16**2 - 1) / 12)),
    "q5_0": _at(0, math.sqrt((32**2 - 1) / 12)),
    "q8_0": _at(0, _INT8),
    "q4_k": _k_scales(7.5, _k_unit(16)),
    "q5_k": _k_scales(15.5, _k_unit(32)),
    "q6_k": _at(208, _INT8 * math.sqrt((64**2 - 1) / 12)),
    "mxfp4": _power_of_two,
}


_PATTERN_BLOCKS = 65_521  # the largest prime below 2 ** 16


def write_random_gguf(shape: ModelShape, architecture: str, blocks: WeightBlocks, path: Path, seed: int = 0) -> None:
    """Write a model to ``path`` atomically.

    ``architecture``: as llama.cpp calls it; ``blocks``: see ``weight_blocks``. Matrices whose rows do not fill a block
    have another one, as with llama.cpp's own quantiser. Raises ShapeError for a family or a block that is not known
    here, and OSError.
    """
    from gguf import GGUFEndian, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape

    layout = gguf_layout(shape, architecture)
    chosen = [(tensor, _block_of(tensor, blocks, shape.moe_layers)) for tensor in layout.tensors]
    with atomic_path(path) as aside:
        writer = GGUFWriter(aside, architecture, endianess=GGUFEndian.LITTLE)
        add_metadata(writer, layout.metadata)
        for tensor, block in chosen:
            kind, _, _ = block_format(block)
            rows = quant_shape_to_byte_shape(tensor.shape[::-1], kind)
            writer.add_tensor_info(tensor.name, rows, np.dtype(np.uint8), math.prod(rows), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for content in _contents(chosen, np.random.default_rng(seed)):
            writer.write_tensor_data(content)
        writer.close()


def weights_bytes(shape: ModelShape, architecture: str, blocks: WeightBlocks) -> int:
    """Bytes of the tensors of ``write_random_gguf``, which raises the same."""
    sizes = ((tensor, block_format(_block_of(tensor, blocks, shape.moe_layers))) for tensor in
             gguf_layout(shape, architecture).tensors)
    return sum(math.prod(tensor.shape) // weights * size for tensor, (_, weights, size) in sizes)


def add_metadata(writer: GGUFWriter, metadata: Mapping[str, Value]) -> None:
    """Add keys with the types that llama.cpp reads: unsigned integers and floats of 32 bits, booleans and text."""
    from gguf import GGUFValueType as Kind

    types = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}
    for key, value in metadata.items():
        writer.add_key_value(key, value, types[type(value)])


def _contents(chosen: list[tuple[TensorLayout, str]], random: np.random.Generator) -> Iterator[Bytes]:
    """The bytes of each tensor, one at a time."""
    made: dict[tuple[str, float], Bytes] = {}
    for tensor, block in chosen:
        _, weights, size_bytes = block_format(block)
        count = math.prod(tensor.shape) // weights
        std = 1 / math.sqrt(tensor.shape[0])  # outputs are as large as inputs
        if tensor.constant is not None:
            yield np.full(count, tensor.constant, np.float32).view(np.uint8)
        elif block == "f32":
            yield random_blocks(block, count, std, random).reshape(-1)
        else:
            std = 1.0 if tensor.part == "embedding" else std
            if (block, std) not in made:
                made[block, std] = random_blocks(block, _PATTERN_BLOCKS, std, random).reshape(-1)
            yield np.resize(made[block, std], count * size_bytes)


def _block_of(tensor: TensorLayout, blocks: WeightBlocks, layers: int) -> str:
    """The block of a tensor; a mix is spread over the layers."""
    if tensor.part == "f32":
        return "f32"
    mix: Mapping[str, float] = getattr(blocks, tensor.part)
    block = block_of_row(_at_layer(mix, tensor.layer, layers), tensor.shape[0])
    _, weights, _ = block_format(block)
    if tensor.shape[0] % weights:
        raise ShapeError(f"{tensor.name}: rows of {tensor.shape[0]} weights: no block of random weights fits them")
    return block


def _at_layer(mix: Mapping[str, float], layer: int, layers: int) -> str:
    """The block of a layer: rarer ones evenly spread, the first of the mix everywhere else."""
    first, *others = mix
    for block in others:
        count = round(mix[block] * layers)
        if (layer + 1) * count // layers > layer * count // layers:
            return block
    return first
