"""GGUF files for tests: headers, and holes in place of weights, with the tensors that llama.cpp's converter writes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, MXFP4 = 0, 1, 2, 8, 12, 14, 39
BLOCKS = {  # bytes, weights
    F32: (4, 1), F16: (2, 1), Q4_0: (18, 32), Q8_0: (34, 32), Q4_K: (144, 256), Q6_K: (210, 256), MXFP4: (17, 32),
}
Tensors = Iterable[tuple[str, tuple[int, ...], int]]  # name, shape, type
Matrices = list[tuple[str, tuple[int, ...]]]


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Tensors, version: int = 3) -> Path:
    """A header with this metadata and table, and as many bytes after it, all zero, as the tensors take."""
    return write_whole(path, gguf_bytes(metadata, tensors := list(tensors), version), weights_bytes(tensors))


def write_whole(path: Path, header: bytes, weights: int) -> Path:
    """A file with a hole of so many bytes in place of its weights."""
    with path.open("wb") as file:
        file.write(header)
        if weights:
            file.truncate(padded(len(header)) + weights)
    return path


def gguf_bytes(metadata: Mapping[str, object], tensors: Tensors, version: int = 3) -> bytes:
    """A header alone."""
    table, at = [], 0
    for name, shape, number in tensors:
        table.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, at))
        at += padded(size_bytes(shape, number))
    keys = [text(key) + value(each) for key, each in metadata.items()]
    return b"".join((b"GGUF", struct.pack("<IQQ", version, len(table), len(keys)), *keys, *table))


def weights_bytes(tensors: Tensors) -> int:
    return sum(padded(size_bytes(shape, number)) for _, shape, number in tensors)


def size_bytes(shape: tuple[int, ...], number: int) -> int:
    size, weights = BLOCKS.get(number, (1, 1))
    return prod(shape) // weights * size % 2**63


def padded(size: int) -> int:
    """Up to the usual alignment."""
    return -(-size // 32) * 32


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words.encode())) + words.encode()


def value(given: object) -> bytes:
    """A value with its type: booleans, whole numbers, other numbers, texts, lists of one of them."""
    number, packed = _plain(given) if not isinstance(given, list) else (9, _items(given))
    return struct.pack("<I", number) + packed


def _plain(given: object) -> tuple[int, bytes]:
    if isinstance(given, bool):
        return 7, struct.pack("<?", given)
    if isinstance(given, int):
        return 4, struct.pack("<I", given)
    return (6, struct.pack("<f", given)) if isinstance(given, float) else (8, text(str(given)))


def _items(given: list[object]) -> bytes:
    return struct.pack("<IQ", _plain(given[0])[0], len(given)) + b"".join(_plain(each)[1] for each in given)


def grouped(hidden: int, heads: int, kv_heads: int, head_dim: int, gate: bool = False) -> Matrices:
    """Attention with grouped queries."""
    return [
        ("attn_q", (hidden, (1 + gate) * heads * head_dim)), ("attn_k", (hidden, kv_heads * head_dim)),
        ("attn_v", (hidden, kv_heads * head_dim)), ("attn_output", (heads * head_dim, hidden)),
    ]


def latent(hidden: int, heads: int, rank: int) -> Matrices:
    """Latent attention of DeepSeek's widths; ``rank``: of the queries."""
    return [
        ("attn_q_a", (hidden, rank)), ("attn_q_b", (rank, heads * 192)), ("attn_kv_a_mqa", (hidden, 576)),
        ("attn_k_b", (128, 512, heads)), ("attn_v_b", (512, 128, heads)), ("attn_output", (heads * 128, hidden)),
    ]


def delta(hidden: int, mixed: int, values: int, heads: int) -> Matrices:
    """Gated DeltaNet; ``mixed``: queries, keys and values together."""
    return [
        ("attn_qkv", (hidden, mixed)), ("attn_gate", (hidden, values)), ("ssm_ba", (hidden, 2 * heads)),
        ("ssm_conv1d", (4, mixed)), ("ssm_out", (values, hidden)),
    ]


def mamba(hidden: int, projected: int, mixed: int, inner: int) -> Matrices:
    """Mamba-2."""
    return [("ssm_in", (hidden, projected)), ("ssm_conv1d", (4, mixed)), ("ssm_out", (inner, hidden))]


def mixture(hidden: int, width: int, count: int, shared: int = 0, gated: bool = True) -> Matrices:
    """The gate, the experts and the shared experts of a layer."""
    found: Matrices = [("ffn_gate_inp", (hidden, count))]
    for name in ("gate", "up", "down") if gated else ("up", "down"):
        turned = name == "down"
        found.append((f"ffn_{name}_exps", (width, hidden, count) if turned else (hidden, width, count)))
        found += [(f"ffn_{name}_shexp", (shared, hidden) if turned else (hidden, shared))] if shared else []
    return found


def feed_forward(hidden: int, width: int) -> Matrices:
    """A feed-forward part that is no mixture."""
    return [("ffn_gate", (hidden, width)), ("ffn_up", (hidden, width)), ("ffn_down", (width, hidden))]


def model(
    arch: str, keys: Mapping[str, object], vocab: int, layers: list[Matrices], tied: bool = False, experts: int = F16
) -> tuple[dict[str, object], list[tuple[str, tuple[int, ...], int]]]:
    """Metadata and tensors of a model with these matrices in each layer, in 16 bits but for ``experts``."""
    metadata: dict[str, object] = {
        "general.architecture": arch, "general.name": "a model", "tokenizer.ggml.tokens": ["a", "bc"],
        "tokenizer.ggml.scores": [0.5] * 5000, f"{arch}.block_count": len(layers),
    }
    metadata |= {f"{arch}.{key}": each for key, each in keys.items()}
    hidden = keys["embedding_length"]
    assert isinstance(hidden, int)
    tensors = [("token_embd.weight", (hidden, vocab), F16)] + [("output.weight", (hidden, vocab), F16)] * (not tied)
    for number, matrices in enumerate(layers):
        tensors.append((f"blk.{number}.attn_norm.weight", (hidden,), F32))
        for name, shape in matrices:
            tensors.append((f"blk.{number}.{name}.weight", shape, experts if name.endswith("_exps") else F16))
    return metadata, tensors


def keys(experts: int, top_k: int, hidden: int, heads: int, **more: object) -> dict[str, object]:
    """Metadata that every family has; a double underscore stands for a dot."""
    named = {key.replace("__", "."): each for key, each in more.items()}
    counts = {"expert_count": experts, "expert_used_count": top_k, "embedding_length": hidden}
    return {**counts, "attention.head_count": heads, **named}


def qwen3moe(layers: int = 48, experts: int = F16) -> Any:
    layer = grouped(2048, 32, 4, 128) + mixture(2048, 768, 128)
    return model("qwen3moe", keys(128, 8, 2048, 32), 151936, [layer] * layers, experts=experts)
