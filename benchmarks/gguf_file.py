"""A Qwen3-MoE of the Hugging Face library as a GGUF file without a tokenizer: what ``llama-bench`` can load.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names of keys and tensors are llama.cpp's for the
architecture qwen3moe. With the tokenizer model "none" it takes the number of tokens from the vocabulary's size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

VERSION, ALIGNMENT = 3, 32
UINT32, FLOAT32, STRING = 4, 6, 8  # types of values
TYPES = {torch.float32: 0, torch.bfloat16: 30}  # ggml's types of tensors
ARCHITECTURE = "qwen3moe"

Value = int | float | str


def write_gguf(model: Any, path: Path) -> None:
    """``model``: a Qwen3MoeForCausalLM in bfloat16. Norms and routers are written in float32, as llama.cpp has them."""
    values, tensors = metadata_of(model.config), dict(tensors_of(model))
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(values)))
        for key, value in values.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for name, tensor in tensors.items():
            shape = tensor.shape[::-1]  # ggml counts dimensions from the innermost
            file.write(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            file.write(struct.pack("<IQ", TYPES[tensor.dtype], offset))
            offset += _padded(tensor.nbytes)
        for tensor in tensors.values():
            _align(file)
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def metadata_of(config: Any) -> dict[str, Value]:
    """Sizes by llama.cpp's keys."""
    sizes = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), "vocab_size": config.vocab_size,
    }
    named = {f"{ARCHITECTURE}.{key}": value for key, value in sizes.items()}
    return {"general.architecture": ARCHITECTURE, **named, "tokenizer.ggml.model": "none"}


def tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights by llama.cpp's names."""
    yield "token_embd.weight", model.model.embed_tokens.weight.detach()
    for number, layer in enumerate(model.model.layers):
        for name, tensor in _layer(layer):
            yield f"blk.{number}.{name}.weight", tensor.detach()
    yield "output_norm.weight", model.model.norm.weight.detach().float()
    yield "output.weight", model.lm_head.weight.detach()


def _layer(layer: Any) -> Iterator[tuple[str, Tensor]]:
    attention, mixture = layer.self_attn, layer.mlp
    gate, up = mixture.experts.gate_up_proj.chunk(2, dim=1)  # [E, I, H] each
    yield "attn_norm", layer.input_layernorm.weight.float()
    for short in ("q", "k", "v"):
        yield f"attn_{short}", getattr(attention, f"{short}_proj").weight
    yield "attn_output", attention.o_proj.weight
    yield "attn_q_norm", attention.q_norm.weight.float()
    yield "attn_k_norm", attention.k_norm.weight.float()
    yield "ffn_norm", layer.post_attention_layernorm.weight.float()
    yield "ffn_gate_inp", mixture.gate.weight.float()
    yield from (("ffn_gate_exps", gate), ("ffn_up_exps", up), ("ffn_down_exps", mixture.experts.down_proj))


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    return struct.pack("<If", FLOAT32, value) if isinstance(value, float) else struct.pack("<II", UINT32, value)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _align(file: BinaryIO) -> None:
    file.write(bytes(_padded(file.tell()) - file.tell()))
