"""Tiny random models of ``tiny_families`` as GGUF files, as llama.cpp's converter would write them, in 32 bits.

Source of names and metadata: the package gguf, and ggml-org/llama.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kit.tiny_models import VOCAB
from traces.capture.load import Loaded

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # expert_gating_func

# family -> (architecture, its constant in gguf, more metadata)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("QWEN3MOE", {}),
    "qwen2_moe": ("QWEN2MOE", {"expert_shared_feed_forward_length": 24}),
    "olmoe": ("OLMOE", {}),
    "mixtral": ("LLAMA", {}),
    "granitemoe": ("GRANITE_MOE", {"logit_scale": 1.0, "attention.scale": 1.0}),
    "hunyuan_v1_moe": ("HUNYUAN_MOE", {"expert_shared_feed_forward_length": 48}),
    "minimax_m2": ("MINIMAXM2", {"expert_gating_func": SIGMOID, "rope.dimension_count": 8}),
    "glm4_moe": (
        "GLM4_MOE",
        {
            "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": SIGMOID,
            "expert_weights_norm": True, "expert_weights_scale": 1.0, "rope.dimension_count": 4,
        },
    ),
    "ernie4_5_moe": (
        "ERNIE4_5_MOE",
        {
            "leading_dense_block_count": 1, "expert_shared_count": 1, "interleave_moe_layer_step": 1,
            "expert_shared_feed_forward_length": 48,
        },
    ),
    "gpt_oss": ("GPT_OSS", {"attention.sliding_window": 16, "expert_gating_func": SOFTMAX_OF_CHOSEN}),
    "deepseek_v2": (
        "DEEPSEEK2",
        {
            "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": SOFTMAX,
            "expert_weights_norm": False, "expert_weights_scale": 1.0, "attention.kv_lora_rank": 16,
            "attention.q_lora_rank": 16,
            "rope.dimension_count": 8, "attention.key_length": 16, "attention.value_length": 8,
        },
    ),
}
CHANGES: dict[str, dict[str, Any]] = {  # of a family's settings in ``tiny_families``: what llama.cpp does not know
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "qwen2_moe": {"mlp_only_layers": []},
    "olmoe": {"num_key_value_heads": 4},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "glm4_moe": {"n_group": 1, "topk_group": 1},
    "deepseek_v2": {"q_lora_rank": 16, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
}
NORMAL_ROPE = ("mixtral", "granitemoe")  # llama.cpp pairs neighbours, PyTorch halves
OWN_NAMES = {
    "e_score_correction_bias": "exp_probs_b.bias", "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "experts.down_proj": "ffn_down_exps.weight", "experts.down_proj_bias": "ffn_down_exps.bias",
}


def write_gguf_of(loaded: Loaded, path: Path) -> Path:
    """The model of a family in ``ARCHITECTURES`` as a GGUF file without a vocabulary."""
    import gguf

    arch, more = ARCHITECTURES[loaded.name]
    number = getattr(gguf.MODEL_ARCH, arch)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[number])
    _add_metadata(writer, loaded.model.config, more)
    names = gguf.get_tensor_name_map(number, loaded.model.config.num_hidden_layers)
    for name, value in loaded.model.state_dict().items():
        for own, array in _tensors(loaded, names, name, value.numpy()).items():
            writer.add_tensor(own, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: Any, config: Any, more: dict[str, Any]) -> None:
    def count(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    width = count("moe_intermediate_size", "intermediate_size")
    head = count("head_dim") or config.hidden_size // config.num_attention_heads
    keys = {
        "block_count": config.num_hidden_layers, "context_length": 64, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": head,
        "attention.value_length": head, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), "rope.dimension_count": head,
        "expert_count": count("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": 2, "expert_feed_forward_length": width, "vocab_size": VOCAB,
    } | more
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{writer.arch}.{key}", value)
    writer.add_tokenizer_model("none")


def _tensors(loaded: Loaded, names: Any, name: str, value: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """One tensor of PyTorch by its names in the file: gate and up projections are two."""
    block = f"blk.{name.split('layers.')[1].split('.')[0]}." if "layers." in name else ""
    if "experts.gate_up_proj" in name:
        end = "bias" if name.endswith("_bias") else "weight"
        halves = _gate_and_up(loaded, value)
        return {f"{block}ffn_{part}_exps.{end}": half for part, half in zip(("gate", "up"), halves, strict=True)}
    if loaded.name in NORMAL_ROPE and (".q_proj." in name or ".k_proj." in name):
        value = _paired(value, loaded.model.config.hidden_size // loaded.model.config.num_attention_heads)
    if "experts.down_proj" in name and loaded.name == "gpt_oss" and value.ndim == 3:
        value = value.transpose(0, 2, 1)
    own = next((block + new for old, new in OWN_NAMES.items() if name.endswith(old)), None)
    found = own or names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return {found + ".weight" * (found.endswith("sinks")): value.reshape(-1) if found.endswith("b.bias") else value}


def _gate_and_up(loaded: Loaded, value: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """gpt-oss has them column by column, [E, H, 2I]; the others one after the other, [E, 2I, H]."""
    if loaded.name == "gpt_oss":
        first, second = value[..., ::2], value[..., 1::2]
        return (first.swapaxes(1, 2), second.swapaxes(1, 2)) if value.ndim == 3 else (first, second)
    first, second = np.split(value, 2, axis=1)
    return first, second


def _paired(value: NDArray[Any], head: int) -> NDArray[Any]:
    """Rows of each head so that the two of a rotated pair are neighbours."""
    return value.reshape(-1, 2, head // 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
