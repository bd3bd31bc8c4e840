"""One model under llama.cpp's own ``llama-bench``, where that is installed: as many layers' experts on the GPU as fit.

The model is a Qwen3-MoE of the Hugging Face library, written as a GGUF file without a tokenizer.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.contestants import split
from benchmarks.figures import Cell
from realrun.llama_cpp.bench import samples_ns

_ARCHITECTURE = gguf.MODEL_ARCH.QWEN3MOE
_TYPES = {torch.float32: gguf.GGMLQuantizationType.F32, torch.bfloat16: gguf.GGMLQuantizationType.BF16}


def row_of(
    program: str, checkpoint: Path, scratch: Path, limit_bytes: int, prompt_tokens: int, generated: int, runs: int,
    reference_ms: float,
) -> list[Cell]:
    """A row of the table of ``beside_accelerate``. Raises RuntimeError, with what it printed, where it fails."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    file = scratch / "model.gguf"
    write_gguf(model, file)
    placed, gpu = split(checkpoint, limit_bytes, "cpu", "disk"), torch.cuda.is_available()
    on_gpu = min(placed.layers_on_gpu + 1, placed.layers) if gpu else 0  # + 1: with llama.cpp no layer comes and goes
    command = [program, "-m", str(file), "-o", "json", "-r", str(runs), "-p", str(prompt_tokens), "-n", str(generated)]
    if gpu:
        command += ["-ngl", "99", "-ncmoe", str(placed.layers - on_gpu)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()[-500:]}")
    low, tpot, high = _quartiles([ns / generated / 1e6 for ns in samples_ns(done.stdout, program, 0, generated)])
    left = f"experts of {placed.layers - on_gpu} layers on the CPU" if gpu else "all on the CPU"
    kept, share = on_gpu * model.config.num_experts, on_gpu / placed.layers
    return [f"llama-bench, {left}", tpot, f"{low:.1f}-{high:.1f}", reference_ms / tpot, kept, share, 0.0, "no text"]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


# --- the model as a GGUF file -----------------------------------------------------------------------------------------


def write_gguf(model: Any, path: Path) -> None:
    """``model``: a Qwen3MoeForCausalLM in bfloat16. Norms and routers are written in float32, as llama.cpp has them."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_ARCHITECTURE])
    for key, value in metadata_of(model.config).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{writer.arch}.{key}", value)
    writer.add_tokenizer_model("none")  # the number of tokens is the vocabulary's size
    for name, tensor in tensors_of(model):
        octets = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, octets, raw_dtype=_TYPES[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata_of(config: Any) -> dict[str, int | float]:
    """Sizes by llama.cpp's keys."""
    return {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), "vocab_size": config.vocab_size,
    }


def tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights by llama.cpp's names; gate and up projections are two."""
    names = gguf.get_tensor_name_map(_ARCHITECTURE, model.config.num_hidden_layers)
    for name, value in model.state_dict().items():
        block = f"blk.{name.split('layers.')[1].split('.')[0]}." if "layers." in name else ""
        if name.endswith("experts.gate_up_proj"):  # [E, 2I, H]
            gate, up = value.chunk(2, dim=1)
            yield from ((f"{block}ffn_gate_exps.weight", gate), (f"{block}ffn_up_exps.weight", up))
        elif name.endswith("experts.down_proj"):
            yield f"{block}ffn_down_exps.weight", value
        else:
            own = names.get_name(name, try_suffixes=(".weight",))
            assert own is not None, name
            yield own, value.float() if value.ndim == 1 or own.endswith("ffn_gate_inp.weight") else value
