"""A GGUF file of a tiny Qwen3-MoE model with random weights, with or without a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from realrun.llama_cpp.random_gguf import add_metadata, gguf_layout
from traces.models.shape import ModelShape

LAYERS, HIDDEN, HEADS, HEAD, EXPERTS, TOP_K, WIDTH, VOCABULARY = 3, 32, 2, 16, 8, 2, 32, 300
SHAPE = ModelShape(
    "tiny", moe_layers=LAYERS, dense_layers=0, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, expert_width=WIDTH,
    heads=HEADS, kv_heads=1, head_dim=HEAD, kv_width=2 * HEAD, vocab=VOCABULARY,
)


def write_tiny_gguf(path: Path, *, vocabulary: str = "whole", seed: int = 0) -> Path:
    """Three layers of 8 experts, 2 of them for a token, all weights in 32 bits.

    ``vocabulary``: "whole"; "ids", without texts; or "letters", without the tokens of bytes. "A" is token 3.
    """
    import gguf

    layout, writer = gguf_layout(SHAPE, "qwen3moe"), gguf.GGUFWriter(path, "qwen3moe")
    sizes = {key: value for key, value in layout.metadata.items() if key.startswith("qwen3moe.")}
    if vocabulary != "ids":
        del sizes["qwen3moe.vocab_size"]
    add_metadata(writer, {**sizes, "qwen3moe.context_length": 512})
    _add_vocabulary(writer, vocabulary)
    rng = np.random.default_rng(seed)
    for tensor in layout.tensors:
        shape = tensor.shape[::-1]
        values = rng.normal(0, shape[-1] ** -0.5, shape) if tensor.constant is None else np.full(shape, tensor.constant)
        writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: Any, vocabulary: str) -> None:
    if vocabulary == "ids":
        writer.add_tokenizer_model("none")
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
