"""A model's shape from the header of its GGUF file: sizes from its tensors, what they do not say from its metadata, and
what the files of a family leave unsaid from ``gguf_families.yaml``; and the blocks that its weights are kept in.

Bytes are those of the file: ``expert_bytes`` of each layer, ``part_bits`` of each part outside the experts, and
``dense_bits`` such that all of these, with norms and biases, come out exact.
Not counted are the layers that predict several tokens at once, which are loaded for drafts alone, and tables that
llama.cpp looks up on the host (per_layer_token_embd). The cache has 16 bits, llama.cpp's default.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from traces.models.attention import STATE_BYTES, Attention, Reach
from traces.models.gguf_reader import GgufKeys, Tensor, read_gguf_header
from traces.models.names import parted
from traces.models.quantisation import WeightBlocks, weight_blocks
from traces.models.shape import ModelShape, PartBits, ShapeError
from trilane.common.hints import Count
from trilane.common.quoting import quoted
from trilane.common.yaml_files import read_bundled

_FILE = Path(__file__).with_name("gguf_families.yaml")
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)")
_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)(_exps|\.\d+)\.(weight|bias)")
_AHEAD = "nextn."  # tensors of a layer that predicts several tokens
_ON_HOST = "per_layer_token_embd"
_CACHE_BITS = 16.0
_ROUTER = "ffn_gate_inp"


def mixing_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of attention, and of what takes its place, without norms and biases."""
    names = ("attn", "ssm", "shortconv", "indexer")
    return {name: tensor for name, tensor in tensors.items() if name.startswith(names) and len(tensor.shape) > 1}


def attention_of_layer(keys: GgufKeys, layer: int, tensors: Mapping[str, Tensor]) -> Attention:
    """The attention of ``layer``, with these ``mixing_tensors``. Raises ShapeError."""
    params = sum(tensor.elements for tensor in tensors.values())
    if any(name.startswith("ssm") for name in tensors):
        return _state(keys, layer, params)
    if any(name.startswith("shortconv") for name in tensors):
        elements = (keys.count("shortconv.l_cache") - 1) * keys.count("embedding_length")
        return Attention("state", params, state_bytes=STATE_BYTES * elements)
    heads = max(keys.count("attention.head_count", layer), 1)
    if "attention.kv_lora_rank" in keys:
        return _latent(keys, params, heads)
    keys_width, values_width = _widths(keys, layer, tensors)
    output = tensors.get("attn_output.weight")
    head_dim = max(output.shape[0] // heads, 1) if output else max(keys.count("attention.key_length"), 1)
    reach, span = _reach(keys, layer)
    return Attention(reach, params, heads, head_dim, kv_width=keys_width + values_width, span=span)


def _latent(keys: GgufKeys, params: int, heads: int) -> Attention:
    """Latent attention; with an indexer, whose keys are kept too."""
    latent = keys.count("attention.kv_lora_rank") + keys.count("rope.dimension_count", default=0)
    head_dim = keys.count("attention.key_length_mla", default=keys.count("attention.key_length"))
    indexed = keys.count("attention.indexer.key_length", default=0)
    return Attention("full", params, heads, head_dim, kv_width=latent + indexed)


def _widths(keys: GgufKeys, layer: int, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Elements of a token's keys and values: rows of their matrices; keys may be used as values."""
    if key := tensors.get("attn_k.weight"):
        return key.shape[-1], (tensors.get("attn_v.weight") or key).shape[-1]
    heads = keys.count("attention.head_count_kv", layer, default=keys.count("attention.head_count", layer))
    usual = keys.count("embedding_length") // max(keys.count("attention.head_count", layer), 1)
    lengths = (keys.count(f"attention.{which}_length", default=usual) for which in ("key", "value"))
    return heads * next(lengths), heads * next(lengths)


def _reach(keys: GgufKeys, layer: int) -> tuple[Reach, int]:
    """Reach of a layer of grouped queries, and the tokens of its window or chunk."""
    family, pattern = family_of(keys), "attention.sliding_window_pattern"
    if keys.is_list(pattern):
        near = keys.flag(pattern, layer)
    else:
        every = keys.count(pattern, default=family.window_every, least=1)  # of so many layers one has none
        near = layer % every != (0 if family.full_first else every - 1)
    window = family.chunk_tokens or keys.count("attention.sliding_window", default=0)
    return ("chunk" if family.chunk_tokens else "window", window) if near and window else ("full", 0)


def _state(keys: GgufKeys, layer: int, params: int) -> Attention:
    """Gated DeltaNet, Mamba-2 and Kimi Delta Attention: a matrix a head, and the last rows of a convolution."""
    rows = keys.count("ssm.conv_kernel") - 1
    if "kda.head_dim" in keys:
        head_dim, heads = keys.count("kda.head_dim"), max(keys.count("attention.head_count", layer), 1)
        elements = heads * head_dim * (head_dim + 3 * rows)
        return Attention("state", params, heads, max(head_dim, 1), state_bytes=STATE_BYTES * elements)
    inner, state = keys.count("ssm.inner_size"), keys.count("ssm.state_size")
    heads = max(keys.count("ssm.time_step_rank", default=1), 1)
    elements = inner * state + rows * (inner + 2 * keys.count("ssm.group_count", default=0) * state)
    return Attention("state", params, heads, max(inner // heads, 1), state_bytes=STATE_BYTES * elements)


class GgufFamily(NamedTuple):
    """Attention of a family's layers, where its files do not say it; the fields are explained in the YAML file."""

    window_every: Count = 1
    full_first: bool = False
    chunk_tokens: Count | None = None


@cache
def gguf_families() -> Mapping[str, GgufFamily]:
    """Families by the name of the architecture."""
    known: Mapping[str, GgufFamily] = read_bundled(Mapping[str, GgufFamily], _FILE, ShapeError)
    return known


def family_of(keys: GgufKeys) -> GgufFamily:
    """The family of a file. Raises ShapeError for one that is not known, naming it."""
    if keys.architecture not in gguf_families():
        raise ShapeError(
            f"{keys.where}: expected a family with experts that is read, one of those in {_FILE.name}, this is of the "
            f"architecture {quoted(keys.architecture)}; give its config.json instead"
        )
    return gguf_families()[keys.architecture]


@dataclass
class _Layer:
    """The tensors of one layer, by the end of their names."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    expert_bytes: int = 0  # of one of its experts
    mixer: Attention | None = None

    @property
    def ffn_width(self) -> int:
        """Width of its feed-forward part that is no mixture, next to one or alone."""
        up = self.tensors.get("ffn_up.weight")
        return up.shape[-1] if up else 0


def read_gguf_model(path: Path) -> ModelShape:
    """The shape of the model in a GGUF file, or in all parts of one. Raises ShapeError naming the file."""
    header = read_gguf_header(path)
    keys = GgufKeys(header.metadata, str(path))
    family_of(keys)
    experts, layers = keys.count("expert_count", default=0), _layers(keys, header.tensors)
    for layer in layers:
        layer.expert_bytes = sum(tensor.size_bytes for tensor in _expert_tensors(layer)) // max(experts, 1)
    dense, sparse = _paired(path, layers)
    if not sparse or not experts:
        raise ShapeError(f"{path}: expected a model with experts, this one, {quoted(keys.architecture)}, has none")
    shape = _shape(keys, experts, dense, sparse, {tensor.name: tensor for tensor in header.tensors})
    blocks = tuple(number for number, layer in enumerate(layers) if layer.expert_bytes)
    if blocks != shape.expert_blocks:
        shape = replace(shape, moe_blocks=blocks)
    counted = list(_counted(header.tensors, layers))
    rest = sum(tensor.size_bytes for tensor in counted) - shape.routed_bytes
    mean = 8 * max(rest, 1) / max(shape.non_expert_params, 1)
    return replace(shape, dense_bits=mean, part_bits=_part_bits(_by_kind(counted), mean), kv_bits=_CACHE_BITS)


def _part_bits(kinds: Mapping[str, list[Tensor]], mean: float) -> PartBits:
    """Bits per weight of each part; the ``mean`` of a part that there is not."""
    bits = {
        kind: 8 * sum(tensor.size_bytes for tensor in tensors) / sum(tensor.elements for tensor in tensors)
        for kind, tensors in kinds.items() if tensors
    }
    return PartBits(**{part.name: bits.get(part.name, mean) for part in fields(PartBits)})


def _layers(keys: GgufKeys, tensors: Iterable[Tensor]) -> list[_Layer]:
    """The layers of the model, without those that predict several tokens at once."""
    layers = [_Layer() for _ in range(keys.layers)]
    for tensor in tensors:
        if (match := _LAYER.fullmatch(tensor.name)) and int(match[1]) < len(layers):
            layers[int(match[1])].tensors[match[2]] = tensor
    while len(layers) > 1 and any(name.startswith(_AHEAD) for name in layers[-1].tensors):
        layers.pop()
    for number, layer in enumerate(layers):
        if mixing := mixing_tensors(layer.tensors):
            layer.mixer = attention_of_layer(keys, number, mixing)
    return layers


def _paired(path: Path, layers: list[_Layer]) -> tuple[list[_Layer], list[_Layer]]:
    """Layers without experts and those with. Where blocks have attention or experts, the two of a pair become one."""
    dense: list[_Layer] = []
    sparse: list[_Layer] = []
    for number, layer in enumerate(layers):
        if layer.mixer is None and layer.expert_bytes and dense and not dense[-1].ffn_width:
            layer.mixer = dense.pop().mixer
        if layer.mixer is None:
            raise ShapeError(f"{path}: expected attention in layer {number}, or before its experts; there is none")
        (sparse if layer.expert_bytes else dense).append(layer)
    return dense, sparse


def _shape(
    keys: GgufKeys, experts: int, dense: list[_Layer], sparse: list[_Layer], tensors: dict[str, Tensor]
) -> ModelShape:
    mixers = [layer.mixer for layer in (*dense, *sparse) if layer.mixer]
    kinds = tuple(dict.fromkeys(mixers))
    typical = next((kind for kind in reversed(mixers) if kind.reach != "state"), mixers[-1])
    several = len(kinds) > 1 or typical.reach != "full"
    hidden, vocabulary = keys.count("embedding_length", least=1), tensors.get("token_embd.weight")
    weights = [tensor for layer in sparse for tensor in _expert_tensors(layer) if not tensor.name.endswith("bias")]
    first, elements = sparse[0].tensors, sum(tensor.elements for tensor in weights)
    down = first.get("ffn_down_exps.weight") or first.get("ffn_down.0.weight")
    width = down.shape[0] if down else keys.count("expert_feed_forward_length", least=1)
    shared, ahead = first.get("ffn_up_shexp.weight"), keys.count("nextn_predict_layers", default=0)
    shared_width = shared.shape[-1] if shared else sparse[0].ffn_width
    left_out = {"moe_layers": f"{keys.where}, without {ahead} that predict several tokens"} if ahead else {}
    return ModelShape(
        name=keys.where, moe_layers=len(sparse), dense_layers=len(dense), experts=experts,
        top_k=keys.count("expert_used_count"), hidden=hidden, expert_width=width,
        shared_experts=max(keys.count("expert_shared_count", default=1), 1) if shared_width else 0,
        shared_width=shared_width, dense_width=max((layer.ffn_width for layer in dense), default=0),
        heads=typical.heads, head_dim=typical.head_dim,
        kv_heads=typical.heads if "attention.kv_lora_rank" in keys else typical.kv_heads,
        kv_width=typical.kv_width, attention_params=typical.params, vocab=vocabulary.shape[-1] if vocabulary else 0,
        tied_embeddings="output.weight" not in tensors, norm_topk=keys.flag("expert_weights_norm", default=True),
        matrices_per_expert=max(round(elements / (len(sparse) * experts * hidden * width)), 1),
        weight_bits=8 * sum(tensor.size_bytes for tensor in weights) / max(elements, 1),
        expert_bytes=tuple(layer.expert_bytes for layer in sparse),
        expert_tensor_bytes=max((tensor.size_bytes for tensor in weights), default=None),
        mtp_layers=ahead,
        expert_biases=any(tensor.name.endswith("bias") for tensor in _expert_tensors(sparse[0])) or None,
        attention=kinds if several else None, attention_layers=tuple(map(kinds.index, mixers)) if several else None,
        sources={"*": keys.where, **left_out},
    )


def _expert_tensors(layer: _Layer) -> list[Tensor]:
    return [tensor for name, tensor in layer.tensors.items() if _EXPERTS.fullmatch(name)]


def _counted(tensors: Iterable[Tensor], layers: list[_Layer]) -> Iterable[Tensor]:
    """The tensors that are in memory on the GPU or, experts, on either side."""
    for tensor in tensors:
        match = _LAYER.fullmatch(tensor.name)
        if not tensor.name.startswith(_ON_HOST) and (match is None or int(match[1]) < len(layers)):
            yield tensor


def blocks_of(shape: ModelShape) -> WeightBlocks:
    """The blocks of a model: of its GGUF file, or of the weight format of its name; 16 bits without one.

    Raises ShapeError.
    """
    name = parted(shape.name)
    if name.model.lower().endswith(".gguf"):
        return gguf_blocks(Path(name.model))
    return weight_blocks(shape, name.weights or "bf16")


def gguf_blocks(path: Path) -> WeightBlocks:
    """The blocks of each kind of matrix, with the part of the weights that each has. Raises ShapeError."""
    return _blocks(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _blocks(path: Path, changed_ns: int) -> WeightBlocks:
    """``path`` is read anew when it has changed."""
    header = read_gguf_header(path)
    layers = _layers(GgufKeys(header.metadata, str(path)), header.tensors)
    kinds = _by_kind(_counted(header.tensors, layers))
    return WeightBlocks(**{kind: _mix(kinds[kind]) for kind in WeightBlocks._fields})


def _by_kind(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """The matrices of each part of a model: the fields of ``WeightBlocks``, and the router."""
    kinds: dict[str, list[Tensor]] = {kind: [] for kind in (*WeightBlocks._fields, "router")}
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1 and tensor.name.endswith(".weight")]
    states = {_block(tensor.name) for tensor in matrices if re.search(r"\.(ssm|shortconv)", tensor.name)}
    sparse = {_block(tensor.name) for tensor in matrices if _ROUTER in tensor.name}
    for tensor in matrices:
        block = _block(tensor.name)
        kinds[_kind_of_matrix(tensor.name, state=block in states, sparse=block in sparse)].append(tensor)
    kinds["head"] = kinds["head"] or kinds["embedding"]  # tied
    return kinds


def _block(name: str) -> str | None:
    match = _LAYER.fullmatch(name)
    return match[1] if match else None


def _kind_of_matrix(name: str, state: bool, sparse: bool) -> str:
    """The part of the model that a matrix belongs to, in a block with a state, or with experts."""
    if not name.startswith("blk."):
        return "head" if name == "output.weight" else "embedding"
    if _ROUTER in name:
        return "router"
    if _EXPERTS.search(name):
        return "down" if "ffn_down" in name else "gate_up"
    if ".ffn_" in name:
        return "shared" if sparse else "dense"
    return "state" if state else "attention"


def _mix(tensors: Iterable[Tensor]) -> dict[str, float]:
    """The part of the weights that has each type."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.type.name.lower()] += tensor.elements
    return {name: count / counts.total() for name, count in counts.items()}
