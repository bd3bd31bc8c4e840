"""A GGUF file of a tiny Qwen3-MoE model with random weights, with or without a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

LAYERS, HIDDEN, HEADS, HEAD, EXPERTS, TOP_K, WIDTH, VOCABULARY = 3, 32, 2, 16, 8, 2, 32, 300


def write_tiny_gguf(path: Path, *, vocabulary: str = "whole", seed: int = 0) -> Path:
    """Three layers of 8 experts, 2 of them for a token, all weights in 32 bits.

    ``vocabulary``: "whole"; "ids", without texts; or "letters", without the tokens of bytes. "A" is token 3.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(WIDTH)
    _add_vocabulary(writer, vocabulary)
    rng = np.random.default_rng(seed)
    for name, shape in _shapes().items():
        norm = name.endswith("norm.weight")
        values = np.ones(shape) if norm else rng.normal(0, shape[-1] ** -0.5, shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: Any, vocabulary: str) -> None:
    if vocabulary == "ids":
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(VOCABULARY)
        return
    letters = [chr(ord("A") + number) for number in range(VOCABULARY - 3 - 256)]
    others = [f"<0x{byte:02X}>" if vocabulary == "whole" else f"unused{byte}" for byte in range(256)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters, *others])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *[1] * len(letters), *[6 if vocabulary == "whole" else 1] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(False)


def _shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors, the fastest dimension last."""
    layer = {
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,),
        "attn_q": (HEADS * HEAD, HIDDEN), "attn_k": (HEAD, HIDDEN), "attn_v": (HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD), "ffn_gate_inp": (EXPERTS, HIDDEN),
        "ffn_gate_exps": (EXPERTS, WIDTH, HIDDEN), "ffn_up_exps": (EXPERTS, WIDTH, HIDDEN),
        "ffn_down_exps": (EXPERTS, HIDDEN, WIDTH),
    }
    blocks = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    ends = {"token_embd.weight": (VOCABULARY, HIDDEN), "output.weight": (VOCABULARY, HIDDEN)}
    return {**ends, "output_norm.weight": (HIDDEN,), **blocks}
