"""Attention of a layer from its tensors in a GGUF file, and from the metadata of its architecture; what the files of a
family leave unsaid is in ``gguf_families.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from traces.models.attention import Attention, Reach
from traces.models.config_attention import STATE_BYTES
from traces.models.gguf_header import GgufKeys
from traces.models.gguf_tensors import Tensor
from traces.models.shape import ShapeError
from trilane.common.hints import Count
from trilane.common.quoting import quoted
from trilane.common.yaml_files import read_bundled

_FILE = Path(__file__).with_name("gguf_families.yaml")


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
    """How far a layer of grouped queries attends, and the tokens of its window or chunk."""
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
    """By the name of the architecture."""
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
