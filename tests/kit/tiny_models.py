"""Tiny random models of many families, and a tokenizer for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from traces.capture.layers import find_moe_layers
from traces.capture.load import Loaded

LAYERS, EXPERTS, HIDDEN, WIDTH, VOCAB = 4, 8, 32, 48, 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {"intermediate_size": 40, "moe_intermediate_size": WIDTH, "num_experts_per_tok": 2}
LOCAL = {"intermediate_size": WIDTH, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
ROUTED = {**SMALL, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}
GROUPS = {"n_group": 2, "topk_group": 1}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

# family -> (settings, MoE layers, shared experts, scoring rule)
FAMILIES: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "mixtral": (LOCAL, 4, 0, "softmax"),
    "qwen2_moe": (
        {**SMALL, "num_experts": EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
        3,
        1,
        "softmax",
    ),
    "qwen3_moe": ({**SMALL, "num_experts": EXPERTS, "head_dim": 8, "mlp_only_layers": [0]}, 3, 0, "softmax"),
    "deepseek_v2": ({**ROUTED, **MLA, **GROUPS, "topk_method": "group_limited_greedy"}, 3, 1, "softmax"),
    "deepseek_v3": ({**ROUTED, **MLA, **GROUPS}, 3, 1, "sigmoid"),
    "olmoe": ({**LOCAL, "num_experts": EXPERTS}, 4, 0, "softmax"),
    "gpt_oss": ({**LOCAL, "head_dim": 8, "sliding_window": 16}, 4, 0, "softmax"),
    "phimoe": (LOCAL, 4, 0, "softmax"),
    "glm4_moe": ({**ROUTED, "head_dim": 8, **GROUPS}, 3, 1, "sigmoid"),
    "granitemoe": (LOCAL, 4, 0, "softmax"),
    "ernie4_5_moe": (
        {
            **SMALL,
            "moe_num_experts": EXPERTS,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
        },
        3,
        1,
        "softmax",
    ),
    "minimax_m2": ({**LOCAL, "head_dim": 8}, 4, 0, "sigmoid"),
    "hunyuan_v1_moe": ({**LOCAL, "num_experts": EXPERTS, "moe_topk": 2, "head_dim": 8}, 4, 1, "softmax"),
    "gemma4_text": (
        {
            **SMALL,
            "num_experts": EXPERTS,
            "top_k_experts": 2,
            "enable_moe_block": True,
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": 16,
        },
        4,
        1,  # its dense part runs for every token
        "identity",
    ),
    "jamba": (
        {
            **LOCAL,
            "num_experts": EXPERTS,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        2,
        0,
        "softmax",
    ),
}


class Numbers:
    """A tokenizer for text that is token numbers."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def build(family: str, **changes: Any) -> Loaded:
    """A model of a family with the same weights every time; ``changes`` are to its settings."""
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family][0], **changes})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    spread(model)
    return Loaded(family, "random", model, Numbers(), find_moe_layers(model), 32)


def spread(model: Any) -> None:
    """Weights with which routers choose, norms scale and biases correct, where a fresh model's do not."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.ndim == 2 and ("gate.weight" in name or "router" in name):
                value.normal_(std=0.5)  # spread the routers, which families initialise in many ways
            elif "norm.weight" in name:
                value.uniform_(0.5, 1.5)  # so that one norm is not as good as another
            elif "correction_bias" in name or "balancing_bias" in name:
                value.uniform_(-0.5, 0.5)  # a bias that changes what is chosen
            elif "tid2eid" in name:
                value.copy_(torch.rand(len(value), EXPERTS).argsort(-1)[:, : value.shape[1]])  # tokens' own experts


# --- models whose experts the executor must know ----------------------------------------------------------------------

UNLIKE: dict[str, dict[str, Any]] = {
    "nemotron_h": {  # no gate
        **ROUTED,
        "layers_block_type": ["moe", "attention", "moe", "moe"],
        "moe_shared_expert_intermediate_size": 24,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "head_dim": 8,
    },
    "lfm2_moe": {**SMALL, "num_experts": EXPERTS, "num_dense_layers": 1, "layer_types": ["full_attention"] * 4},
}
ALL = (*FAMILIES, *UNLIKE)


def model_of(family: str, **changes: Any) -> Any:
    """A model with the same weights every time, in float32."""
    if family in FAMILIES:
        return build(family, **changes).model
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **UNLIKE[family], **changes})
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()
