"""Attention of each family from the keys of its configuration: all sizes by hand, and every name of a key."""

from __future__ import annotations

from typing import Any

import pytest

from traces.models.attention import Attention
from traces.models.hf_config import ConfigKeys, attention_of, attention_of_layers, shape_of_config
from traces.models.shape import ShapeError

PLAIN: dict[str, Any] = {"hidden_size": 1000, "num_attention_heads": 6}
KIMI = 1000 * (3 * 55 + 5) + 4 * 3 * 55 + 2 * 11 * (1000 + 55) + 55 * 1000  # 5 heads of 11
LATENT = {
    "kv_lora_rank": 13, "qk_rope_head_dim": 3, "qk_nope_head_dim": 7, "v_head_dim": 9, "sliding_window": 17,
}
MAMBA = {
    "mamba_num_heads": 5, "mamba_head_dim": 11, "ssm_state_size": 13, "conv_kernel": 3, "n_groups": 2,
}
MAMBA_PARAMS = 1000 * (55 + (55 + 2 * 2 * 13) + 5) + 3 * (55 + 52) + 55 * 1000

SIZES: list[tuple[str, dict[str, Any], Attention]] = [
    # kind, keys, attention
    ("full_attention", {}, Attention("full", 1000 * 4 * 996, 6, 166, kv_width=2 * 996)),
    ("attention", {"num_key_value_heads": 2, "head_dim": 7}, Attention("full", 1000 * (42 + 28 + 42), 6, 7, 28)),
    ("indexed_attention", {"num_key_value_heads": 2, "head_dim": 7, "indexer_kv_heads": 3, "indexer_head_dim": 5},
     Attention("full", 1000 * (42 + 28 + 42), 6, 7, 28 + 15)),
    ("full_attention", {"head_dim": 7, "attn_output_gate": True}, Attention("full", 1000 * (84 + 84 + 42), 6, 7, 84)),
    ("full_attention", {"head_dim": 7, "linear_num_value_heads": 4},
     Attention("full", 1000 * (84 + 84 + 42), 6, 7, 84)),
    ("full_attention", {"head_dim": 7, "linear_num_value_heads": 4, "attn_output_gate": False},
     Attention("full", 1000 * (42 + 84 + 42), 6, 7, 84)),
    ("full_attention", {"head_dim": 7, "global_head_dim": 9, "num_key_value_heads": 3},
     Attention("full", 1000 * (54 + 2 * 27 + 54), 6, 9, 54)),
    ("full_attention", {"head_dim": 7, "global_head_dim": 9, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
     Attention("full", 1000 * (54 + 18 + 54), 6, 9, 36)),
    ("sliding_attention", {"head_dim": 7, "global_head_dim": 9, "sliding_window": 50, "attention_chunk_size": 60},
     Attention("window", 1000 * 4 * 42, 6, 7, 84, span=50)),
    ("chunked_attention", {"head_dim": 7, "sliding_window": 50, "attention_chunk_size": 60},
     Attention("chunk", 1000 * 4 * 42, 6, 7, 84, span=60)),
    ("full_attention", LATENT,
     Attention("full", 1000 * 6 * 10 + 1000 * 16 + 6 * (13 * 16 + 9 * 1000), 6, 10, kv_width=16)),
    ("full_attention", {**LATENT, "q_lora_rank": 19, "index_n_heads": 4, "index_head_dim": 5},
     Attention("full", 19 * (1000 + 60) + 1000 * 16 + 6 * (13 * 16 + 9000) + 19 * 20 + 1000 * 9, 6, 10, 16 + 5)),
    ("linear_attention",
     {"linear_num_value_heads": 5, "linear_num_key_heads": 3, "linear_key_head_dim": 7, "linear_value_head_dim": 11,
      "linear_conv_kernel_dim": 4},
     Attention("state", 1000 * (97 + 55 + 10) + 4 * 97 + 55 * 1000, 5, 11, state_bytes=4 * (7 * 55 + 3 * 97))),
    ("linear_attention", {"linear_num_heads": 5, "linear_head_dim": 11},
     Attention("state", KIMI, 5, 11, state_bytes=4 * (11 * 55 + 3 * 3 * 55))),
    ("linear_attention", {"linear_attn_config": {"num_heads": 5, "head_dim": 11}, "linear_conv_kernel_dim": 2},
     Attention("state", KIMI - 2 * 3 * 55, 5, 11, state_bytes=4 * (11 * 55 + 1 * 3 * 55))),
    ("conv", {"conv_L_cache": 3}, Attention("state", 4 * 1000**2 + 3 * 1000, 1, 1000, state_bytes=4 * 2 * 1000)),
    ("mamba", MAMBA, Attention("state", MAMBA_PARAMS, 5, 11, state_bytes=4 * (55 * 13 + 2 * 107))),
    ("mamba2",
     {"mamba_n_heads": 5, "mamba_d_head": 11, "mamba_d_state": 13, "mamba_d_conv": 3, "mamba_n_groups": 2},
     Attention("state", MAMBA_PARAMS, 5, 11, state_bytes=4 * (55 * 13 + 2 * 107))),
]


@pytest.mark.parametrize(("kind", "keys", "expected"), SIZES)
def test_the_sizes_of_a_layer(kind: str, keys: dict[str, Any], expected: Attention) -> None:
    assert attention_of(ConfigKeys({**PLAIN, **keys}, "config.json"), kind) == expected


LAYERS: list[tuple[dict[str, Any], str]] = [
    # keys, and what each of eight layers is: full, window, chunk or state
    ({}, "ffffffff"),
    ({"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 5}, "wfwfwfwf"),
    ({"linear_attn_config": {"full_attn_layers": [2, 8], "num_heads": 1, "head_dim": 1}}, "sfsssssf"),
    ({"full_attn_idxs": [0, 5], "conv_L_cache": 3}, "fssssfss"),
    ({"attention_chunk_size": 9, "no_rope_layers": [1, 0, 1]}, "cfccfccf"),
    ({"attention_chunk_size": 9}, "cccfcccf"),
    ({"attention_chunk_size": 9, "no_rope_layer_interval": 3}, "ccfccfcc"),
    ({"full_attention_interval": 3, "linear_num_heads": 1, "linear_head_dim": 1}, "ssfssfss"),
    ({"layer_group_size": 5, "linear_num_heads": 1, "linear_head_dim": 1}, "ssssfsss"),
    ({"sliding_window": 9}, "wwwwwwww"),
    ({"sliding_window": 9, "sliding_window_pattern": 8}, "wwwwwwwf"),
    ({"sliding_window": 9, "max_position_embeddings": 10}, "wwwwwwww"),
    ({"sliding_window": 9, "max_position_embeddings": 9}, "ffffffff"),
    ({"sliding_window": 9, "use_sliding_window": False}, "ffffffff"),
]


@pytest.mark.parametrize(("keys", "expected"), LAYERS)
def test_the_kind_of_each_layer(keys: dict[str, Any], expected: str) -> None:
    found = attention_of_layers(ConfigKeys({**PLAIN, **keys}, "config.json"), 8)
    assert "".join(kind.reach[0] for kind in found) == expected


def test_an_unknown_kind_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ShapeError, match="layer_types: the attention 'wavy' is not known; expected full_"):
        attention_of(ConfigKeys(PLAIN, "config.json"), "wavy")


# --- the model --------------------------------------------------------------------------------------------------------

MODEL: dict[str, Any] = {
    **PLAIN, "head_dim": 8, "num_hidden_layers": 4, "num_experts": 12, "num_experts_per_tok": 3, "vocab_size": 500,
    "moe_intermediate_size": 70, "intermediate_size": 90, "num_shared_experts": 2, "first_k_dense_replace": 1,
    "tie_word_embeddings": False, "norm_topk_prob": False, "hidden_act": "silu",
}
SHAPE = shape_of_config(MODEL, "mine", "config.json")


def test_every_size_of_a_model() -> None:
    found = SHAPE
    sizes = (found.moe_layers, found.dense_layers, found.experts, found.top_k, found.hidden, found.expert_width)
    assert sizes == (3, 1, 12, 3, 1000, 70)
    assert (found.shared_experts, found.shared_width, found.dense_width, found.vocab) == (2, 140, 90, 500)
    assert (found.heads, found.kv_heads, found.head_dim, found.kv_width) == (6, 6, 8, 96)
    assert found.attention_params == 1000 * 4 * 48
    assert (found.tied_embeddings, found.norm_topk, found.matrices_per_expert) == (False, False, 3)
    assert (found.weight_bits, found.attention, found.attention_layers, found.moe_blocks) == (16.0, None, None, None)
    assert (found.name, found.sources) == ("mine", {"*": "config.json"})


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("num_experts", "n_routed_experts num_local_experts moe_num_experts"),
        ("num_experts_per_tok", "num_experts_per_token moe_topk moe_k"),
        ("num_shared_experts", "n_shared_experts num_shared_expert moe_num_shared_experts"),
        ("first_k_dense_replace", "num_dense_layers moe_layer_start_index"),
        ("intermediate_size", "intermediate_size_mlp"),
        ("tie_word_embeddings", "tie_embedding"),
        ("norm_topk_prob", "moe_renormalize"),
        ("hidden_act", "mlp_hidden_act"),
    ],
)
def test_families_name_the_same_thing_differently(key: str, others: str) -> None:
    for other in others.split():
        renamed = {(other if name == key else name): value for name, value in MODEL.items()}
        assert shape_of_config(renamed, "mine", "config.json") == SHAPE, other


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"mlp_hidden_act": "relu2"}, {"matrices_per_expert": 2}),
        ({"quantization_config": {"quant_method": "mxfp4"}}, {"weight_bits": 4.25}),
        ({"quantization_config": {"quant_method": "fp8"}}, {"weight_bits": 16.0}),
        ({"shared_expert_intermediate_size": 33}, {"shared_experts": 2, "shared_width": 33}),
        ({"num_shared_experts": 0, "moe_shared_expert_intermediate_size": 33}, {"shared_experts": 1}),
        ({"num_shared_experts": 0, "share_expert_dim": 0}, {"shared_experts": 0, "shared_width": 0}),
        ({"num_shared_experts": None, "shared_intermediate_size": 9}, {"shared_experts": 1, "shared_width": 9}),
        ({"model_type": "llama4_text"}, {"shared_experts": 1, "shared_width": 90, "norm_topk": False}),
        ({"model_type": "llama4_text", "norm_topk_prob": None, "moe_renormalize": None}, {"norm_topk": False}),
        ({"top_k_experts": 5}, {"top_k": 3, "shared_experts": 1, "shared_width": 90}),
        ({"first_k_dense_replace": 0}, {"dense_layers": 0, "moe_layers": 4, "dense_width": 0}),
        ({"moe_layer_end_index": -1}, {"dense_layers": 1, "moe_layers": 3}),
        ({"moe_layer_end_index": 2}, {"dense_layers": 2, "moe_layers": 2, "moe_blocks": (1, 2)}),
        ({"decoder_sparse_step": 2, "first_k_dense_replace": 0}, {"moe_layers": 2, "moe_blocks": (1, 3)}),
        ({"moe_layers": [0, 2]}, {"moe_layers": 2, "moe_blocks": (0, 2)}),
    ],
)
def test_what_a_key_changes(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    changed = {name: value for name, value in {**MODEL, **keys}.items() if value is not None}
    found = shape_of_config(changed, "mine", "config.json")
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("outer", ["text_config", "llm_config", "language_config"])
def test_the_language_model_in_one_that_sees(outer: str) -> None:
    text = {name: value for name, value in MODEL.items() if name != "tie_word_embeddings"}
    values = {outer: {**text, "vocab_size": 500}, "vocab_size": 3, "tie_word_embeddings": False}
    assert shape_of_config(values, "mine", "config.json") == SHAPE
