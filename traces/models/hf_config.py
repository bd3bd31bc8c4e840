"""A model's shape from its Hugging Face config.json: nothing but sizes, so that any family with the usual keys works.

Weights are taken in 16 bits, as most models are published, but for experts in MXFP4 (gpt-oss). Layers that predict
several tokens at once, and encoders of pictures and sounds, are left out.

Families of attention, by the keys that they have: grouped queries (windows and chunks too), latent attention
(kv_lora_rank), Gated DeltaNet (linear_num_value_heads), Kimi Delta Attention (linear_num_heads), Mamba-2
(mamba_num_heads) and short convolutions (conv_L_cache). States, and the last rows of convolutions, are kept in 32 bits,
as llama.cpp and transformers do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from traces.models.attention import STATE_BYTES, Attention, Reach
from traces.models.shape import ModelShape, ShapeError
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

_NESTED = ("text_config", "llm_config", "language_config")  # the language model in that of a model that sees or hears
_MOST_VALUE = 10**9
_REACH: dict[str, Reach] = {
    "full_attention": "full", "indexed_attention": "full", "attention": "full", "sliding_attention": "window",
    "chunked_attention": "chunk", "linear_attention": "state", "mamba": "state", "mamba2": "state", "conv": "state",
}
_MOST_BYTES = 2**22
_MOST_LAYERS = 1000
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim",
    "shared_intermediate_size",
)
_DENSE = ("dense", "mlp")  # entries of mlp_layer_types and layers_block_type
_PATTERN = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}  # of hybrid_override_pattern
_NOT_NORMALISED = ("phimoe", "llama4")  # families whose chosen weights do not sum to 1, and that have no key for it
_SHARED_AS_WIDE = "llama4"  # a family with one shared expert of the routed ones' width, and no key for it
_MXFP4_BITS = 4.25


@dataclass(frozen=True)
class ConfigKeys:
    """The keys of a configuration; ``where`` begins every message."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, values: object, where: str) -> ConfigKeys:
        """The keys of the language model. Raises ShapeError for what is no mapping."""
        if not isinstance(values, Mapping):
            raise ShapeError(f"{where}: expected a JSON object with keys such as hidden_size, got {quoted(values)}")
        for key in _NESTED:
            if isinstance(inner := values.get(key), Mapping):
                outer = {name: value for name, value in values.items() if name not in _NESTED}
                return cls.of({**outer, **inner}, where)
        return cls(values, where)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The whole number at the first of ``keys`` that is there; a list is one number if all of it is equal.

        Raises ShapeError where there is none and no default, and for other values.
        """
        key = next((key for key in keys if key in self), None)
        if key is None and default is not None:
            return default
        if key is None:
            raise ShapeError(
                f"{self.where}: expected the key {' or '.join(keys)}; this is no configuration of a Mixture-of-Experts "
                f"model, or a family's that is not known: give the model's GGUF file, or an entry in models.yaml"
            )
        value = self.values[key]
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or not least <= value <= _MOST_VALUE:
            raise ShapeError(f"{self.where}: {key}: expected a whole number of at least {least}, got {quoted(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The truth value at ``key``. Raises ShapeError for other values."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ShapeError(f"{self.where}: {key}: expected true or false, got {quoted(value)}")
        return value

    def text(self, key: str) -> str:
        """The text at ``key``, or an empty one."""
        return value if isinstance(value := self.values.get(key), str) else ""

    def whole_numbers(self, key: str) -> tuple[int, ...]:
        """A list of layers, or of a value for each; empty if it is not there. Raises ShapeError for other values."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ShapeError(f"{self.where}: {key}: expected a list of whole numbers, got {quoted(value)}")
        return tuple(value)

    def per_layer(self, key: str, layers: int) -> tuple[str, ...]:
        """A text for each of ``layers``. Raises ShapeError for other values."""
        value = self.values[key]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value) or len(value) != layers:
            raise ShapeError(f"{self.where}: {key}: expected a text for each of {layers} layers, got {quoted(value)}")
        return tuple(value)

    def nested(self, key: str) -> ConfigKeys:
        """The keys of the object at ``key``."""
        return ConfigKeys.of(self.values[key], f"{self.where}: {key}")


def attention_of_layers(keys: ConfigKeys, layers: int) -> list[Attention]:
    """The attention of each layer, with what mixes its inputs. Raises ShapeError for a kind that is not known."""
    made = [attention_of(keys, kind) for kind in _kinds(keys, layers)]
    hashed = keys.whole_numbers("ple_layer_ids")  # counted from 1
    return [
        replace(kind, params=kind.params + _mixing(keys, number in hashed)) if "hc_count" in keys else kind
        for number, kind in enumerate(made, 1)
    ]


def _mixing(keys: ConfigKeys, hashed: bool) -> int:
    """Weights of a layer next to attention and experts in Qwen3.8-Flash-Next (transformers' modeling_qwen4_exp): before
    each of the two, several residual streams are mixed through a low rank and weighed; ``hashed`` layers add rows of a
    table of n-grams, which the host looks up, through a key and a value matrix.
    """
    hidden, streams, rank = keys.count("hidden_size"), keys.count("hc_count"), keys.count("hc_lowrank")
    mixers = 2 * streams * hidden * (2 * rank + streams)
    return mixers + (streams + 1) * hidden * hidden * hashed


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
    """A test for layers, counted from 0, that are the last of so many."""
    return lambda layer: (layer + 1) % interval == 0


def _positionless(keys: ConfigKeys) -> Callable[[int], bool]:
    """Llama 4: layers without rotary positions attend to everything."""
    rotary = keys.whole_numbers("no_rope_layers")
    if rotary:
        return lambda layer: not rotary[layer % len(rotary)]
    return _every(keys.count("no_rope_layer_interval", default=4))


def _has_window(keys: ConfigKeys) -> bool:
    """True if there is a window, and it is narrower than the longest sequence."""
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
    params += hidden * (indexed + keys.count("indexer_n_heads", default=0) * keys.count("indexer_head_dim", default=0))
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


def read_config(path: Path) -> ModelShape:
    """The shape in the config.json at ``path``, which is its name. Raises ShapeError naming the file and the key."""
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ShapeError(f"{path}: expected a config.json of at most {_MOST_BYTES:,} bytes, got more")
    return shape_of_config(parse_json(text, str(path), ShapeError), str(path), str(path))


def shape_of_config(values: object, name: str, where: str) -> ModelShape:
    """The shape in a configuration. Raises ShapeError, which begins with ``where``, for keys that miss or are wrong."""
    keys = ConfigKeys.of(values, where)
    experts = keys.count(*_EXPERTS)
    dense, sparse = _layers(keys)
    width = keys.count("moe_intermediate_size", "intermediate_size")
    shared, shared_width = _shared(keys, width)
    typical = next((kind for kind in (*sparse, *dense) if kind.reach != "state"), sparse[0])
    kinds = tuple(dict.fromkeys((*dense, *sparse)))
    several = len(kinds) > 1 or kinds[0].reach != "full"
    has_dense_ffn = bool(dense) and not _blocks(keys)
    latent, normalised = "kv_lora_rank" in keys, not keys.text("model_type").startswith(_NOT_NORMALISED)
    published = keys.nested("quantization_config").text("quant_method") if "quantization_config" in keys else ""
    tied = keys.flag("tie_word_embeddings", keys.flag("tie_embedding", True))  # files leave transformers' defaults out
    activation = keys.text("mlp_hidden_act") or keys.text("hidden_act")
    return ModelShape(
        name=name, moe_layers=len(sparse), dense_layers=len(dense), experts=experts, top_k=keys.count(*_TOP_K),
        hidden=keys.count("hidden_size"), expert_width=width, shared_experts=shared, shared_width=shared_width,
        dense_width=keys.count("intermediate_size_mlp", "intermediate_size") if has_dense_ffn else 0,
        heads=typical.heads, kv_heads=typical.heads if latent else typical.kv_heads, head_dim=typical.head_dim,
        kv_width=typical.kv_width, attention_params=typical.params, vocab=keys.count("vocab_size"),
        tied_embeddings=tied, norm_topk=keys.flag("norm_topk_prob", keys.flag("moe_renormalize", normalised)),
        matrices_per_expert=2 if activation == "relu2" else 3,
        weight_bits=_MXFP4_BITS if published == "mxfp4" else 16.0,
        attention=kinds if several else None,
        attention_layers=tuple(kinds.index(kind) for kind in (*dense, *sparse)) if several else None,
        moe_blocks=_moe_blocks(keys, len(dense)), sources={"*": where},
    )


def _layers(keys: ConfigKeys) -> tuple[list[Attention], list[Attention]]:
    """The attention of the layers without a mixture, and of those with one."""
    if blocks := _blocks(keys):
        return _paired(keys, blocks)
    count = keys.count("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise ShapeError(f"{keys.where}: num_hidden_layers: expected at most {_MOST_LAYERS}, got {count:,}")
    mixture = [_is_mixture(keys, layer, count) for layer in range(count)]
    if not any(mixture):
        raise ShapeError(f"{keys.where}: expected a layer with experts, its keys leave none of {count} layers")
    both = list(zip(attention_of_layers(keys, count), mixture, strict=True))
    return [kind for kind, sparse in both if not sparse], [kind for kind, sparse in both if sparse]


def _moe_blocks(keys: ConfigKeys, dense: int) -> tuple[int, ...] | None:
    """The numbers of the blocks with experts; None where these come after all others."""
    names = _blocks(keys)
    layers = len(names) or keys.count("num_hidden_layers")
    blocks = tuple(n for n in range(layers) if (names[n] == "moe" if names else _is_mixture(keys, n, layers)))
    return None if blocks == tuple(range(dense, dense + len(blocks))) else blocks


def _is_mixture(keys: ConfigKeys, layer: int, layers: int) -> bool:
    """True for a layer with experts, by whichever key says it."""
    if "mlp_layer_types" in keys:
        return keys.per_layer("mlp_layer_types", layers)[layer] not in _DENSE
    if keys.values.get("moe_layers"):
        return layer in keys.whole_numbers("moe_layers")
    if isinstance(keys.values.get("moe_layer_freq"), list):
        return bool(keys.whole_numbers("moe_layer_freq")[layer : layer + 1] != (0,))
    first = keys.count("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0, least=0)
    last = keys.count("moe_layer_end_index", default=layers, least=-1)
    step = keys.count("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval", default=1)
    inside = first <= layer and (last == -1 or layer <= last)
    return inside and (layer + 1) % step == 0 and layer not in keys.whole_numbers("mlp_only_layers")


def _blocks(keys: ConfigKeys) -> list[str]:
    """Families whose layers have attention or experts but not both: what each has; empty for all others."""
    if "layers_block_type" in keys:
        return list(keys.per_layer("layers_block_type", len(keys.values["layers_block_type"])))
    return [_PATTERN.get(letter, letter) for letter in keys.text("hybrid_override_pattern")]


def _paired(keys: ConfigKeys, blocks: list[str]) -> tuple[list[Attention], list[Attention]]:
    """Experts with the attention before them; attention that is followed by more is a layer without experts."""
    if "moe_latent_size" in keys or "mlp" in blocks or len(blocks) > _MOST_LAYERS:
        raise ShapeError(
            f"{keys.where}: expected at most {_MOST_LAYERS} blocks, none of type mlp, and no moe_latent_size; give the "
            f"model's GGUF file instead"
        )
    dense: list[Attention] = []
    sparse: list[Attention] = []
    for block, before in zip(blocks, ["", *blocks], strict=False):
        if block != "moe":
            dense.append(attention_of(keys, block))
        elif before in ("", "moe"):
            raise ShapeError(f"{keys.where}: expected attention before each block of experts, got {quoted(blocks)}")
        else:
            sparse.append(dense.pop())
    if not sparse:
        raise ShapeError(f"{keys.where}: expected a block of experts, got {quoted(blocks)}")
    return dense, sparse


def _shared(keys: ConfigKeys, expert_width: int) -> tuple[int, int]:
    """Number of shared experts, and their width together. Gemma 4 and Llama 4 have no key for theirs."""
    if keys.text("model_type").startswith(_SHARED_AS_WIDE) or "top_k_experts" in keys:
        return 1, keys.count("intermediate_size")
    count = keys.count(*_SHARED, default=0, least=0)
    width = keys.count(*_SHARED_WIDTH, default=0, least=0) or count * expert_width
    return max(count, 1) if width else 0, width
