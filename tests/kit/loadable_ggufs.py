"""GGUF files that llama.cpp loads: models of real widths, a few layers deep, with holes in place of their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.traces.models.gguf_files import (
    F32,
    Q4_0,
    Q8_0,
    Matrices,
    delta,
    feed_forward,
    grouped,
    mixture,
    write_gguf,
)

_CONTEXT = 131_072
Keys = dict[str, Any]
Made = tuple[Keys, int, list[Matrices]]  # metadata, tokens of the vocabulary, tensors of each layer


def norms(hidden: int, *names: str) -> Matrices:
    return [(name, (hidden,)) for name in names]


def keys(hidden: int, heads: int, kv_heads: Any, head_dim: int, experts: int, top_k: int, **more: Any) -> Keys:
    """Metadata that every family has; a double underscore stands for a dot."""
    return {
        "embedding_length": hidden, "attention.head_count": heads, "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim, "expert_count": experts,
        "expert_used_count": top_k, "attention.layer_norm_rms_epsilon": 1e-6, "context_length": _CONTEXT,
        "rope.freq_base": 1e6, **{key.replace("__", "."): value for key, value in more.items()},
    }


def qwen3moe() -> Made:
    """Qwen3-30B-A3B."""
    layer = norms(2048, "attn_norm", "ffn_norm") + norms(128, "attn_q_norm", "attn_k_norm")
    sizes = keys(2048, 32, 4, 128, 128, 8, expert_feed_forward_length=768, feed_forward_length=6144)
    return sizes, 151_936, [layer + grouped(2048, 32, 4, 128) + mixture(2048, 768, 128)] * 4


def mixtral() -> Made:
    """Mixtral 8x7B, whose architecture is llama."""
    layer = norms(4096, "attn_norm", "ffn_norm") + grouped(4096, 32, 8, 128) + mixture(4096, 14_336, 8)
    return keys(4096, 32, 8, 128, 8, 2, feed_forward_length=14_336, rope__dimension_count=128), 32_000, [layer] * 4


def olmoe() -> Made:
    """OLMoE-1B-7B."""
    layer = norms(2048, "attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm")
    sizes = keys(2048, 16, 16, 128, 64, 8, feed_forward_length=1024)
    return sizes, 50_304, [layer + grouped(2048, 16, 16, 128) + mixture(2048, 1024, 64)] * 4


def gpt_oss() -> Made:
    """gpt-oss-20b: windows of 128 tokens in every second layer, biases."""
    mixer = grouped(2880, 64, 8, 64)
    biases = [(name.replace("_exps", "_exps.bias") + ".bias" * ("_exps" not in name), shape[1:])
              for name, shape in [*mixer, *mixture(2880, 2880, 32)]]
    layer = norms(2880, "attn_norm", "post_attention_norm") + norms(64, "attn_sinks") + mixer
    sizes = keys(2880, 64, 8, 64, 32, 4, attention__sliding_window=128, expert_feed_forward_length=2880)
    return sizes, 201_088, [layer + mixture(2880, 2880, 32) + biases] * 4


def deepseek2() -> Made:
    """DeepSeek-V2-Lite: latent attention, a dense layer, shared experts."""
    mixer: Matrices = [
        *norms(512, "attn_kv_a_norm"), ("attn_q", (2048, 3072)), ("attn_kv_a_mqa", (2048, 576)),
        ("attn_k_b", (128, 512, 16)), ("attn_v_b", (512, 128, 16)), ("attn_output", (2048, 2048)),
    ]
    first = norms(2048, "attn_norm", "ffn_norm") + mixer
    sizes = keys(
        2048, 16, 1, 576, 64, 6, attention__kv_lora_rank=512, attention__q_lora_rank=0, attention__key_length_mla=192,
        attention__value_length=512, attention__value_length_mla=128, rope__dimension_count=64, expert_shared_count=2,
        leading_dense_block_count=1, expert_feed_forward_length=1408, feed_forward_length=10_944,
        expert_weights_scale=1.0,
    )
    return sizes, 102_400, [first + feed_forward(2048, 10_944)] + [first + mixture(2048, 1408, 64, 2816)] * 4


def glm4moe() -> Made:
    """GLM-4.5-Air: a dense layer, a shared expert, and a last layer that predicts several tokens."""
    mixer = norms(4096, "attn_norm", "post_attention_norm") + grouped(4096, 96, 8, 128)
    mixer += [("attn_q.bias", (12_288,)), ("attn_k.bias", (1024,)), ("attn_v.bias", (1024,))]
    sparse = mixer + mixture(4096, 1408, 128, 1408) + [("exp_probs_b.bias", (128,))]
    ahead = [*norms(4096, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"), ("nextn.eh_proj", (8192, 4096))]
    sizes = keys(
        4096, 96, 8, 128, 128, 8, expert_feed_forward_length=1408, feed_forward_length=10_944, expert_shared_count=1,
        leading_dense_block_count=1, nextn_predict_layers=1, rope__dimension_count=64,
    )
    return sizes, 151_552, [mixer + feed_forward(4096, 10_944)] + [sparse] * 3 + [sparse + ahead]


def gemma4() -> Made:
    """Gemma 4 26B-A4B: windows of 1,024 tokens in five of six layers, tied embeddings, gate and up in one matrix."""
    names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "pre_ffw_norm_2", "post_ffw_norm_1",
             "post_ffw_norm_2", "ffn_gate_inp.scale")
    fused: Matrices = [("ffn_gate_inp", (2816, 128)), ("ffn_gate_up_exps", (2816, 1408, 128))]
    ffn = norms(2816, *names) + fused + [("ffn_down_exps", (704, 2816, 128))] + feed_forward(2816, 2112)
    far = [part for part in grouped(2816, 16, 2, 512) if part[0] != "attn_v"] + norms(512, "attn_q_norm", "attn_k_norm")
    near = grouped(2816, 16, 8, 256) + norms(256, "attn_q_norm", "attn_k_norm")
    pattern = [True] * 5 + [False]
    sizes = keys(
        2816, 16, [8 if each else 2 for each in pattern], 512, 128, 8, attention__sliding_window=1024,
        attention__sliding_window_pattern=pattern, attention__key_length_swa=256, attention__value_length_swa=256,
        expert_feed_forward_length=704, feed_forward_length=2112, embedding_length_per_layer_input=0,
        final_logit_softcapping=30.0,
    )
    return sizes, 262_144, [(near if each else far) + ffn for each in pattern]


def qwen3next() -> Made:
    """Qwen3-Next-80B-A3B: three layers of Gated DeltaNet and one of full attention."""
    names = norms(2048, "attn_norm", "post_attention_norm", "ffn_gate_inp_shexp")
    ffn = names + mixture(2048, 512, 512, 512)
    own: Matrices = [("ssm_dt.bias", (32,)), ("ssm_a.plain", (32,)), ("ssm_norm", (128,))]
    state = delta(2048, 8192, 4096, 32) + own
    full = grouped(2048, 16, 2, 256, gate=True) + norms(256, "attn_q_norm", "attn_k_norm")
    sizes = keys(
        2048, 16, 2, 256, 512, 10, expert_feed_forward_length=512, feed_forward_length=5120, ssm__conv_kernel=4,
        ssm__inner_size=4096, ssm__state_size=128, ssm__time_step_rank=32, ssm__group_count=16,
        full_attention_interval=4, expert_shared_feed_forward_length=512, rope__dimension_count=64,
    )
    return sizes, 151_936, [state + ffn] * 3 + [full + ffn]


FAMILIES: Mapping[str, Callable[[], Made]] = {
    "qwen3moe": qwen3moe, "llama": mixtral, "olmoe": olmoe, "gpt-oss": gpt_oss, "deepseek2": deepseek2,
    "glm4moe": glm4moe, "gemma4": gemma4, "qwen3next": qwen3next,
}
_TIED = {"gemma4"}
TWICE_AS_DEEP = {f"{family}, twice as deep": family for family in ("gpt-oss", "gemma4", "qwen3next")}


def write_loadable(family: str, path: Path, experts: int = Q4_0, others: int = Q8_0) -> Path:
    """A file of a family, without a tokenizer; types are numbers of ggml, for matrices."""
    deeper, family = family in TWICE_AS_DEEP, TWICE_AS_DEEP.get(family, family)
    sizes, vocab, layers = FAMILIES[family]()
    if deeper:
        sizes, layers = {key: 2 * each if isinstance(each, list) else each for key, each in sizes.items()}, 2 * layers
    metadata = {"general.architecture": family, "tokenizer.ggml.model": "none", f"{family}.vocab_size": vocab}
    metadata |= {f"{family}.block_count": len(layers)} | {f"{family}.{key}": each for key, each in sizes.items()}
    hidden = sizes["embedding_length"]
    table: list[tuple[str, tuple[int, ...], int]] = [("token_embd.weight", (hidden, vocab), others)]
    for number, layer in enumerate(layers):
        for name, shape in layer:
            table.append((f"blk.{number}.{_ended(name)}", shape, _type(name, shape, experts, others)))
    table.append(("output_norm.weight", (hidden,), F32))
    table += [("rope_freqs.weight", (256,), F32)] * (family == "gemma4")
    table += [("output.weight", (hidden, vocab), others)] * (family not in _TIED)
    return write_gguf(path, metadata, table)


def _ended(name: str) -> str:
    if name.endswith(".plain"):
        return name.removesuffix(".plain")
    return name if name.endswith((".bias", ".scale")) else f"{name}.weight"


def _type(name: str, shape: Sequence[int], experts: int, others: int) -> int:
    """Norms, biases, gates and convolutions are in 32 bits."""
    if len(shape) == 1 or name.endswith(".bias") or name in ("ffn_gate_inp", "ssm_conv1d") or shape[0] % 32:
        return F32
    return experts if name.endswith("_exps") else others
