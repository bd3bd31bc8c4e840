"""The two mini models of the bundled traces: real routing topologies, small enough to train on one CPU core."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 2048
CONTEXT = 1024


def deepseek_config(vocab: int = VOCAB, layers: int = 27) -> DeepseekV2Config:
    """DeepSeek-V2-Lite's routing, layer for layer (its config.json: 27 layers of which the first is dense, 64 routed
    experts, 2 shared, top-6 of a plain softmax, weights not renormalised), at 1/16 of its hidden width.
    """
    return DeepseekV2Config(
        intermediate_size=352,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,  # as wide as a key, so that fused attention kernels apply
        **_common(vocab, layers),
    )


def moe_config(vocab: int = VOCAB, layers: int = 8) -> Qwen3MoeConfig:
    """A model to run in tests and on small machines: 8 MoE layers, 16 experts, top-2 renormalised, 5.5 M weights."""
    return Qwen3MoeConfig(
        moe_intermediate_size=96,
        intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_key_value_heads=2,
        **{"head_dim": 32, **_common(vocab, layers)},
    )


def _common(vocab: int, layers: int) -> dict[str, Any]:
    """Settings of both models; token 0 is padding, and nothing ends a text."""
    return {
        "vocab_size": vocab,
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


MODELS = {
    "mini-deepseek": (DeepseekV2ForCausalLM, deepseek_config),
    "mini-moe": (Qwen3MoeForCausalLM, moe_config),
}


def build_model(name: str, seed: int, **sizes: int) -> PreTrainedModel:
    """A freshly initialised float32 model. ``sizes``: ``vocab`` and ``layers``, where they differ from the default.
    Raises KeyError, naming the known models, on another name.
    """
    if name not in MODELS:
        raise KeyError(f"no mini model {name!r}; known: {sorted(MODELS)}")
    model_class, config = MODELS[name]
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config(**sizes)).float()
    return model
