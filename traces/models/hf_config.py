"""A model's shape from its Hugging Face config.json: nothing but sizes, so that any family with the usual keys works.

Weights are taken in 16 bits, as most models are published, but for experts in MXFP4 (gpt-oss). Layers that predict
several tokens at once, and encoders of pictures and sounds, are left out.
"""

from __future__ import annotations

from pathlib import Path

from traces.models.attention import Attention
from traces.models.config_attention import attention_of, attention_of_layers
from traces.models.config_keys import ConfigKeys
from traces.models.shape import ModelShape, ShapeError
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

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
_MXFP4_BITS = 4.25


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
    found = tuple(n for n in range(layers) if (names[n] == "moe" if names else _is_mixture(keys, n, layers)))
    return None if found == tuple(range(dense, dense + len(found))) else found


def _is_mixture(keys: ConfigKeys, layer: int, layers: int) -> bool:
    """Whether a layer has experts, by whichever key says it."""
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
    """How many shared experts there are, and their width together. Gemma 4 and Llama 4 have no key for theirs."""
    if keys.text("model_type").startswith("llama4") or "top_k_experts" in keys:
        return 1, keys.count("intermediate_size")
    count = keys.count(*_SHARED, default=0, least=0)
    width = keys.count(*_SHARED_WIDTH, default=0, least=0) or count * expert_width
    return max(count, 1) if width else 0, width
