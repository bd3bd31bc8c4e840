"""A model's shape from the header of its GGUF file: sizes from its tensors, what they do not say from its metadata.

Bytes are those of the file: ``expert_bytes`` of each layer, ``dense_bits`` such that everything else comes out exact.
Not counted are the layers that predict several tokens at once, which are loaded for drafts alone, and tables that
llama.cpp looks up on the host (per_layer_token_embd). The cache has 16 bits, llama.cpp's default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from traces.models.attention import Attention
from traces.models.gguf_attention import attention_of_layer, family_of, mixing_tensors
from traces.models.gguf_header import GgufKeys, read_gguf_header
from traces.models.gguf_tensors import Tensor
from traces.models.shape import ModelShape, ShapeError
from trilane.common.quoting import quoted

_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)")
_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)(_exps|\.\d+)\.(weight|bias)")
_AHEAD = "nextn."  # tensors of a layer that predicts several tokens
_ON_HOST = "per_layer_token_embd"
_CACHE_BITS = 16.0


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
    rest = sum(tensor.size_bytes for tensor in _counted(header.tensors, layers)) - shape.routed_bytes
    return replace(shape, dense_bits=8 * max(rest, 1) / max(shape.non_expert_params, 1), kv_bits=_CACHE_BITS)


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
        embedding_bits=8 * vocabulary.size_bytes / vocabulary.elements if vocabulary else None,
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
