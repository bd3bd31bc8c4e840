"""Shapes from config.json: those of the catalogue, from transformers' own configurations; files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from traces.models.attention import Attention
from traces.models.catalogue import load_model
from traces.models.hf_config import ConfigKeys, attention_of, attention_of_layers, shape_of_config
from traces.models.shape import ModelShape, ShapeError

PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"  # of Nemotron-3-Nano
BLOCKS = [{"M": "linear_attention", "E": "moe", "*": "full_attention"}[letter] for letter in PATTERN]
NEMOTRON = hf.NemotronHConfig(
    hidden_size=2688, layers_block_type=BLOCKS, num_key_value_heads=2, mamba_num_heads=64, n_routed_experts=128,
    moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, num_experts_per_tok=6,
)
QWEN_122B = hf.Qwen3_5MoeTextConfig(
    hidden_size=3072, num_hidden_layers=48, num_attention_heads=32, linear_num_value_heads=64,
    moe_intermediate_size=1024, shared_expert_intermediate_size=1024,
)
MXFP4 = {"quant_method": "mxfp4"}
CONFIGS: dict[str, hf.PreTrainedConfig] = {
    "mixtral-8x7b": hf.MixtralConfig(),
    "phi-3.5-moe": hf.PhimoeConfig(),
    "olmoe-1b-7b": hf.OlmoeConfig(intermediate_size=1024),
    "qwen3-30b-a3b": hf.Qwen3MoeConfig(num_hidden_layers=48, head_dim=128, norm_topk_prob=True),
    "qwen3-next-80b-a3b": hf.Qwen3NextConfig(),
    "qwen3.5-35b-a3b": hf.Qwen3_5MoeTextConfig(),
    "qwen3.5-122b-a10b": QWEN_122B,
    "glm-4.5-air": hf.Glm4MoeConfig(head_dim=128),
    "glm-4.7-flash": hf.Glm4MoeLiteConfig(),
    "glm-5": hf.GlmMoeDsaConfig(),
    "gpt-oss-20b": hf.GptOssConfig(num_hidden_layers=24, num_local_experts=32, quantization_config=MXFP4),
    "gpt-oss-120b": hf.GptOssConfig(quantization_config=MXFP4),
    "llama-4-scout": hf.Llama4TextConfig(),
    "llama-4-maverick": hf.Llama4TextConfig(num_local_experts=128, interleave_moe_layer_step=2),
    "minimax-m2": hf.MiniMaxM2Config(),
    "deepseek-v2-lite": hf.DeepseekV2Config(
        hidden_size=2048, num_hidden_layers=27, num_attention_heads=16, q_lora_rank=None, first_k_dense_replace=1,
        intermediate_size=10944, moe_intermediate_size=1408, num_experts_per_tok=6,
    ),
    "deepseek-v3": hf.DeepseekV3Config(),
    "deepseek-v3.2": hf.DeepseekV32Config(),
    "ernie-4.5-21b-a3b": hf.Ernie4_5_MoeConfig(),
    "ling-3.0-flash": hf.BailingHybridConfig(),
    "nemotron-3-nano-30b": NEMOTRON,
    "glm-5.3-flash": hf.Glm5NextTextConfig(),
    "lfm2-8b-a1b": hf.Lfm2MoeConfig(
        num_hidden_layers=24,
        layer_types=["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    ),
}
GEMMA = hf.Gemma4TextConfig(
    hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8,
    sliding_window=1024, num_experts=128, top_k_experts=8, moe_intermediate_size=704, enable_moe_block=True,
    attention_k_eq_v=True,
)


def values_of(config: hf.PreTrainedConfig) -> dict[str, Any]:
    """What ``save_pretrained`` writes."""
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return written


def sizes(shape: ModelShape) -> dict[str, Any]:
    return {key: value for key, value in shape.to_dict().items() if key not in ("name", "sources")}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_gives_the_shape_of_the_catalogue(name: str) -> None:
    made = sizes(shape_of_config(values_of(CONFIGS[name]), name, "config.json"))
    known = sizes(load_model(name))
    assert {key: (made[key], known[key]) for key in made if made[key] != known[key] and key != "norm_topk"} == {}


def test_the_layers_of_gemma_have_two_widths() -> None:
    """``global_head_dim`` and its heads are keys of the published file, which transformers turns into others."""
    values = {**values_of(GEMMA), "global_head_dim": 512, "num_global_key_value_heads": 2}
    made, known = shape_of_config({"text_config": values}, "gemma", "config.json"), load_model("gemma-4-26b-a4b")
    assert (made.attention, made.attention_layers) == (known.attention, known.attention_layers)
    assert (made.params, made.shared_width, made.cache_bytes(9999)) == (known.params, 2112, known.cache_bytes(9999))


def test_patterns_and_lists_say_the_same_of_the_blocks() -> None:
    values = values_of(NEMOTRON)
    del values["layers_block_type"]
    made = shape_of_config({**values, "hybrid_override_pattern": PATTERN}, "nemotron", "config.json")
    assert sizes(made) == sizes(load_model("nemotron-3-nano-30b"))


QWEN = values_of(CONFIGS["qwen3-30b-a3b"])


def made(**changed: object) -> ModelShape:
    return shape_of_config({**QWEN, "use_sliding_window": True, **changed}, "mine", "mine/config.json")


@pytest.mark.parametrize(("keys", "dense", "sparse"), [
    ({}, 0, 48),
    ({"first_k_dense_replace": 3}, 3, 45),
    ({"num_dense_layers": 2}, 2, 46),
    ({"mlp_only_layers": [0, 5]}, 2, 46),
    ({"decoder_sparse_step": 2}, 24, 24),
    ({"mlp_layer_types": ["dense"] + ["sparse"] * 47}, 1, 47),
    ({"moe_layers": [1, 2]}, 46, 2),
    ({"mlp_only_layers": [*range(47)]}, 47, 1),
    ({"moe_layer_freq": [0] + [1] * 47}, 1, 47),
    ({"moe_layer_start_index": 1, "moe_layer_end_index": 46, "moe_layer_interval": 1}, 2, 46),
])
def test_layers_without_experts(keys: dict[str, object], dense: int, sparse: int) -> None:
    shape = made(**keys)
    assert (shape.dense_layers, shape.moe_layers, shape.dense_width) == (dense, sparse, 6144 if dense else 0)


def reaches(shape: ModelShape) -> list[tuple[str, int]]:
    return [(kind.reach, layers) for kind, layers in shape.attention_counts]


@pytest.mark.parametrize(("keys", "expected"), [
    ({"sliding_window": 4096}, [("window", 48)]),
    ({"sliding_window": 4096, "use_sliding_window": False}, [("full", 48)]),
    ({"sliding_window": 40960, "max_position_embeddings": 40960}, [("full", 48)]),
    ({"sliding_window": 512, "sliding_window_pattern": 6}, [("window", 40), ("full", 8)]),
    ({"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 12}, [("chunk", 36), ("full", 12)]),
])
def test_windows_and_chunks(keys: dict[str, object], expected: list[tuple[str, int]]) -> None:
    assert reaches(made(**keys)) == expected


@pytest.mark.parametrize(("keys", "words"), [
    ({"num_local_experts": None}, r"expected the key num_experts or .*; this is no configuration"),
    ({"hidden_size": None}, "expected the key hidden_size"),
    ({"hidden_size": -1}, "hidden_size: expected a whole number of at least 1, got -1"),
    ({"hidden_size": 2048.5}, "hidden_size: expected a whole number"),
    ({"num_hidden_layers": 10**8}, "num_hidden_layers: expected at most 1000, got 100,000,000"),
    ({"num_hidden_layers": True}, "num_hidden_layers: expected a whole number"),
    ({"moe_intermediate_size": [768, 512]}, "moe_intermediate_size: expected a whole number"),
    ({"layer_types": ["full_attention"]}, "layer_types: expected a text for each of 48 layers"),
    ({"layer_types": ["retention"] * 48}, "layer_types: the attention 'retention' is not known"),
    ({"mlp_only_layers": list(range(48))}, "expected a layer with experts"),
    ({"mlp_only_layers": "all"}, "mlp_only_layers: expected a list of whole numbers"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
    ({"num_experts_per_tok": 500}, "top_k 500 exceeds the 128 experts"),
    ({"num_local_experts": 2**40}, "num_local_experts: expected a whole number"),
    ({"hybrid_override_pattern": "EM"}, "expected attention before each block of experts"),
    ({"hybrid_override_pattern": "XE"}, "the attention 'X' is not known"),
    ({"hybrid_override_pattern": "**"}, r"config\.json: expected a block of experts, got"),
    ({"hybrid_override_pattern": "M-ME"}, "none of type mlp"),
])
def test_what_is_missing_or_wrong_is_named(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        made(**keys)


def test_a_file_and_its_folder_are_models(tmp_path: Path) -> None:
    folder = tmp_path / "my@home:1" / "model"
    folder.mkdir(parents=True)
    file = folder / "config.json"
    file.write_text(json.dumps(QWEN))
    for name in (str(file), str(folder)):
        shape = load_model(name)
        assert (shape.name, sizes(shape)) == (str(file), sizes(load_model("qwen3-30b-a3b")))
        cut = load_model(f"{name}@q4_k_m:8")
        assert cut.moe_layers == 8
        assert cut.weight_bits == load_model("qwen3-30b-a3b@q4_k_m").weight_bits
    assert load_model(f"{file}@q4_k_m").name == f"{file}@q4_k_m"


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for layers in (48, 12):
        file.write_text(json.dumps({**QWEN, "num_hidden_layers": layers}))
        assert load_model(str(file)).moe_layers == layers


@pytest.mark.parametrize(("content", "words"), [
    ("", "not plain JSON"),
    ("[1]", "expected a JSON object"),
    ('{"hidden_size": 1, "hidden_size": 2}', "duplicate key 'hidden_size'"),
    ("{" * 100_000, "not plain JSON"),
    (" " * 2**23, "expected a config.json of at most"),
])
def test_a_file_that_is_no_configuration(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ShapeError, match=words) as caught:
        load_model(str(file))
    assert str(caught.value).startswith(str(file))


def test_a_path_without_a_file(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "config.json", tmp_path / "model.gguf"):
        with pytest.raises(ShapeError, match=r"expected a config\.json, a folder that holds one, or a GGUF file"):
            load_model(f"{name}@q4_k_m")


PLAIN: dict[str, Any] = {"hidden_size": 1000, "num_attention_heads": 6}
KIMI = 1000 * (3 * 55 + 5) + 4 * 3 * 55 + 2 * 11 * (1000 + 55) + 55 * 1000  # 5 heads of 11
LATENT = {"kv_lora_rank": 13, "qk_rope_head_dim": 3, "qk_nope_head_dim": 7, "v_head_dim": 9, "sliding_window": 17}
MAMBA = {"mamba_num_heads": 5, "mamba_head_dim": 11, "ssm_state_size": 13, "conv_kernel": 3, "n_groups": 2}
MAMBA_PARAMS = 1000 * (55 + (55 + 2 * 2 * 13) + 5) + 3 * (55 + 52) + 55 * 1000

SIZES: list[tuple[str, dict[str, Any], Attention]] = [
    # kind, keys, attention
    ("full_attention", {}, Attention("full", 1000 * 4 * 996, 6, 166, kv_width=2 * 996)),
    ("attention", {"num_key_value_heads": 2, "head_dim": 7}, Attention("full", 1000 * (42 + 28 + 42), 6, 7, 28)),
    ("indexed_attention", {"num_key_value_heads": 2, "head_dim": 7, "indexer_kv_heads": 1, "indexer_head_dim": 5},
     Attention("full", 1000 * (42 + 28 + 42) + 1000 * 5, 6, 7, 28 + 5)),
    ("indexed_attention",
     {"num_key_value_heads": 2, "head_dim": 7, "indexer_kv_heads": 1, "indexer_head_dim": 5, "indexer_n_heads": 4},
     Attention("full", 1000 * (42 + 28 + 42) + 1000 * 5 * 5, 6, 7, 28 + 5)),
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


@pytest.mark.parametrize(("key", "others"), [
    ("num_experts", "n_routed_experts num_local_experts moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token moe_topk moe_k"),
    ("num_shared_experts", "n_shared_experts num_shared_expert moe_num_shared_experts"),
    ("first_k_dense_replace", "num_dense_layers moe_layer_start_index"),
    ("intermediate_size", "intermediate_size_mlp"),
    ("tie_word_embeddings", "tie_embedding"),
    ("norm_topk_prob", "moe_renormalize"),
    ("hidden_act", "mlp_hidden_act"),
])
def test_families_name_the_same_thing_differently(key: str, others: str) -> None:
    for other in others.split():
        renamed = {(other if name == key else name): value for name, value in MODEL.items()}
        assert shape_of_config(renamed, "mine", "config.json") == SHAPE, other


@pytest.mark.parametrize(("keys", "expected"), [
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
])
def test_what_a_key_changes(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    changed = {name: value for name, value in {**MODEL, **keys}.items() if value is not None}
    found = shape_of_config(changed, "mine", "config.json")
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("outer", ["text_config", "llm_config", "language_config"])
def test_the_language_model_in_one_that_sees(outer: str) -> None:
    text = {name: value for name, value in MODEL.items() if name != "tie_word_embeddings"}
    values = {outer: {**text, "vocab_size": 500}, "vocab_size": 3, "tie_word_embeddings": False}
    assert shape_of_config(values, "mine", "config.json") == SHAPE


def test_streams_of_residuals_and_n_grams_are_among_the_weights_of_their_layers() -> None:
    """Two mixers a layer, of 4 x 1000 to 7, back, and to 4; the second layer has 5 matrices of 1000 by 1000 more."""
    keys = {**PLAIN, "head_dim": 7, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "vocab_size": 10, "num_hidden_layers": 3}
    plain = shape_of_config(keys, "m", "m")
    mixed = shape_of_config({**keys, "hc_count": 4, "hc_lowrank": 7, "ple_layer_ids": [2]}, "m", "m")
    own, mixers = 1000 * 4 * 42, 2 * 4000 * (2 * 7 + 4)
    assert (plain.attention, plain.attention_params, mixed.attention_layers) == (None, own, (0, 1, 0))
    assert [kind.params - own for kind in mixed.attention or ()] == [mixers, mixers + 5 * 1000 * 1000]
