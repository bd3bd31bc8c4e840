"""Attention of every layer from a model's config.json: which kind each layer has, and the sizes of each kind.

Families, by the keys that they have: grouped queries (windows and chunks too), latent attention (kv_lora_rank), Gated
DeltaNet (linear_num_value_heads), Kimi Delta Attention (linear_num_heads), Mamba-2 (mamba_num_heads) and short
convolutions (conv_L_cache). States, and the last rows of convolutions, are kept in 32 bits, as llama.cpp and
transformers do.
"""

from __future__ import annotations

from collections.abc import Callable

from traces.models.attention import Attention, Reach
from traces.models.config_keys import ConfigKeys
from traces.models.shape import ShapeError
from trilane.common.quoting import quoted

STATE_BYTES = 4  # of an element
_REACH: dict[str, Reach] = {
    "full_attention": "full", "indexed_attention": "full", "attention": "full", "sliding_attention": "window",
    "chunked_attention": "chunk", "linear_attention": "state", "mamba": "state", "mamba2": "state", "conv": "state",
}


def attention_of_layers(keys: ConfigKeys, layers: int) -> list[Attention]:
    """The attention of each layer. Raises ShapeError for a kind that is not known."""
    return [attention_of(keys, kind) for kind in _kinds(keys, layers)]


def attention_of(keys: ConfigKeys, kind: str) -> Attention:
    """The attention of a layer of this kind, as ``layer_types`` names it."""
    if kind not in _REACH:
        raise ShapeError(
            f"{keys.where}: layer_types: the attention {quoted(kind)} is not known; expected {', '.join(_REACH)}"
        )
    reach = _REACH[kind]
    if reach == "state":
        return next((made for key, made in _STATES.items() if key in keys), _mamba)(keys)
    return _latent(keys) if "kv_lora_rank" in keys else _grouped(keys, reach)


def _kinds(keys: ConfigKeys, layers: int) -> list[str]:
    """The kind of each layer, by whichever key says it."""
    if "layer_types" in keys:
        return list(keys.per_layer("layer_types", layers))
    if "linear_attn_config" in keys:
        full = keys.nested("linear_attn_config").whole_numbers("full_attn_layers")
        return _where(lambda layer: layer + 1 in full, layers, "full_attention", "linear_attention")
    if "full_attn_idxs" in keys:
        return _where(keys.whole_numbers("full_attn_idxs").__contains__, layers, "full_attention", "conv")
    if "attention_chunk_size" in keys:
        return _where(_positionless(keys), layers, "full_attention", "chunked_attention")
    for key in ("full_attention_interval", "layer_group_size"):
        if key in keys:
            return _where(_every(keys.count(key)), layers, "full_attention", "linear_attention")
    if not _has_window(keys):
        return ["full_attention"] * layers
    every = _every(keys.count("sliding_window_pattern", default=layers + 1))
    return _where(every, layers, "full_attention", "sliding_attention")


def _where(holds: Callable[[int], bool], layers: int, yes: str, no: str) -> list[str]:
    return [yes if holds(layer) else no for layer in range(layers)]


def _every(interval: int) -> Callable[[int], bool]:
    """Whether a layer, counted from 0, is the last of so many."""
    return lambda layer: (layer + 1) % interval == 0


def _positionless(keys: ConfigKeys) -> Callable[[int], bool]:
    """Llama 4: layers without rotary positions attend to everything."""
    rotary = keys.whole_numbers("no_rope_layers")
    if rotary:
        return lambda layer: not rotary[layer % len(rotary)]
    return _every(keys.count("no_rope_layer_interval", default=4))


def _has_window(keys: ConfigKeys) -> bool:
    """Whether there is a window, and it is narrower than the longest sequence."""
    if "sliding_window" not in keys or not keys.flag("use_sliding_window", True):
        return False
    longest = keys.count("max_position_embeddings", default=2**62)
    return keys.count("sliding_window", least=0) < longest


def _grouped(keys: ConfigKeys, reach: Reach) -> Attention:
    """Queries that share keys and values; the keys of an indexer. Gemma 4's full layers have their own widths."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", default=heads)
    head_dim = keys.count("head_dim", default=max(hidden // heads, 1))
    projections = 2
    if reach == "full" and "global_head_dim" in keys:
        head_dim = keys.count("global_head_dim")
        kv_heads = keys.count("num_global_key_value_heads", default=kv_heads)
        projections -= keys.flag("attention_k_eq_v", False)
    gate = keys.flag("attn_output_gate", "linear_num_value_heads" in keys)
    queries = (1 + gate) * heads * head_dim
    params = hidden * (queries + projections * kv_heads * head_dim + heads * head_dim)
    indexed = keys.count("indexer_kv_heads", default=0) * keys.count("indexer_head_dim", default=0)
    span = {"window": "sliding_window", "chunk": "attention_chunk_size"}.get(reach)
    tokens = keys.count(span) if span else 0
    return Attention(reach, params, heads, head_dim, kv_width=2 * kv_heads * head_dim + indexed, span=tokens)


def _latent(keys: ConfigKeys) -> Attention:
    """DeepSeek's latent attention; with an indexer (sparse attention) its keys are kept, too."""
    hidden, heads, latent = keys.count("hidden_size"), keys.count("num_attention_heads"), keys.count("kv_lora_rank")
    rotary, plain = keys.count("qk_rope_head_dim", least=0), keys.count("qk_nope_head_dim")
    head_dim, value_dim = plain + rotary, keys.count("v_head_dim")
    rank = keys.count("q_lora_rank", default=0)
    queries = rank * (hidden + heads * head_dim) if rank else hidden * heads * head_dim
    params = queries + hidden * (latent + rotary) + heads * (latent * (plain + value_dim) + value_dim * hidden)
    indexers, width = keys.count("index_n_heads", default=0), keys.count("index_head_dim", default=0)
    params += rank * indexers * width + hidden * (indexers + width)
    return Attention("full", params, heads, head_dim, kv_width=latent + rotary + width)


def _gated_delta(keys: ConfigKeys) -> Attention:
    hidden, heads = keys.count("hidden_size"), keys.count("linear_num_value_heads")
    key_dim, value_dim = keys.count("linear_key_head_dim"), keys.count("linear_value_head_dim")
    values, mixed = heads * value_dim, 2 * keys.count("linear_num_key_heads") * key_dim + heads * value_dim
    kernel = keys.count("linear_conv_kernel_dim")
    params = hidden * (mixed + values + 2 * heads) + kernel * mixed + values * hidden
    return _stateful(params, heads, value_dim, key_dim * values + (kernel - 1) * mixed)


def _kimi_delta(keys: ConfigKeys) -> Attention:
    """Two low-rank gates of the rank of a head; see transformers' modeling_kimi_linear."""
    own = keys if "linear_num_heads" in keys else keys.nested("linear_attn_config")
    heads, head_dim = own.count("linear_num_heads", "num_heads"), own.count("linear_head_dim", "head_dim")
    hidden, width, kernel = keys.count("hidden_size"), heads * head_dim, keys.count("linear_conv_kernel_dim", default=4)
    gates = 2 * head_dim * (hidden + width)
    params = hidden * (3 * width + heads) + kernel * 3 * width + gates + width * hidden
    return _stateful(params, heads, head_dim, head_dim * width + (kernel - 1) * 3 * width)


def _mamba(keys: ConfigKeys) -> Attention:
    hidden, heads = keys.count("hidden_size"), keys.count("mamba_num_heads", "mamba_n_heads")
    head_dim, state = keys.count("mamba_head_dim", "mamba_d_head"), keys.count("ssm_state_size", "mamba_d_state")
    width, kernel = heads * head_dim, keys.count("conv_kernel", "mamba_d_conv")
    mixed = width + 2 * keys.count("n_groups", "mamba_n_groups") * state
    params = hidden * (width + mixed + heads) + kernel * mixed + width * hidden
    return _stateful(params, heads, head_dim, width * state + (kernel - 1) * mixed)


def _short_convolution(keys: ConfigKeys) -> Attention:
    hidden, kernel = keys.count("hidden_size"), keys.count("conv_L_cache")
    return _stateful(4 * hidden * hidden + kernel * hidden, 1, hidden, (kernel - 1) * hidden)


def _stateful(params: int, heads: int, head_dim: int, elements: int) -> Attention:
    return Attention("state", params, heads, head_dim, state_bytes=STATE_BYTES * elements)


_STATES: dict[str, Callable[[ConfigKeys], Attention]] = {  # what is not attention proper, by a key that only it has
    "linear_num_value_heads": _gated_delta, "linear_num_heads": _kimi_delta, "linear_attn_config": _kimi_delta,
    "conv_L_cache": _short_convolution,
}
