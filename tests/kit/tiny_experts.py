"""Tiny models whose experts the executor must know: those of the traces' tests, and others with unlike experts."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.kit.tiny_families import COMMON, EXPERTS, FAMILIES, ROUTED, SMALL, build

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
