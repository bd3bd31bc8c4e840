"""Two closed forms to compare predictions with: bytes over data-sheet bandwidths, and llmfit's.

Neither knows fixed times, what a processor reaches of its data sheet, or what an engine does. The null model of
policies (``sim.runs.bounds``) is another one, with the bandwidths that a machine reaches.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.costs.engine import FittedEngine, load_fitted
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.engines.accuracy.errors import Speeds
from trilane.engines.accuracy.measured_rows import MeasuredRow
from trilane.engines.accuracy.prediction import context_of, machine_of, shape_of, split_of
from trilane.engines.split_speed import StaticSplit

LLMFIT_GPU, LLMFIT_ALL = 0.55, 0.8  # shares of the GPU's bandwidth, and of the sum


class BytesRead(NamedTuple):
    """Bytes that a token reads on either side; keys and values lie where attention is computed."""

    gpu_weights: float
    cpu_weights: float
    cache: float


def token_bytes(shape: ModelShape, hardware: Hardware, split: StaticSplit, context: int) -> BytesRead:
    """With ``context`` tokens in the KV cache. ``gpu``: the CPU where there is no GPU."""
    sizes = [shape.top_k * size for size in shape.expert_bytes_by_layer]
    on_cpu = 0.0 if hardware.cpu_only else sum(sizes[: split.cpu_layers]) * (1 - split.gpu_experts / shape.experts)
    return BytesRead(weights_of_others(shape) + sum(sizes) - on_cpu, on_cpu, shape.cache_bytes(context))


def weights_of_others(shape: ModelShape) -> float:
    """Bytes of weights outside the routed experts that a token reads; of the embeddings one row, which is left out."""
    embedding = 0.0 if shape.tied_embeddings else shape.vocab * shape.hidden * shape.dense_bits / 8
    return shape.non_expert_bytes - embedding


def data_sheet(row: MeasuredRow) -> Speeds:
    """Bytes over data-sheet bandwidths, one after the other; of prompts products over the 16-bit rate, too.

    Raises what ``load_model``, ``load_hardware`` and ``load_fitted`` raise.
    """
    shape, hardware, split = shape_of(row), machine_of(row.machine), split_of(row)
    read = token_bytes(shape, hardware, split, context_of(row))
    gpu_s = (read.gpu_weights + read.cache) / hardware.gpu.bandwidth_bytes_per_s
    decode_s = gpu_s + read.cpu_weights / hardware.cpu.dram_bytes_per_s
    if row.prompt_tokens is None:
        return Speeds(1 / decode_s)
    prompt_s = sheet_prompt_s(shape, hardware, load_fitted(row.engine), split, row.prompt_tokens)
    return Speeds(1 / decode_s, row.prompt_tokens / prompt_s)


def sheet_prompt_s(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, tokens: int
) -> float:
    """Seconds of a prompt. Experts in DRAM are computed or copied as the engine does it; those that are copied cross
    the link once a piece, all of a layer.
    """
    cpu_layers = 0 if hardware.cpu_only else min(split.cpu_layers, shape.moe_layers)
    away = cpu_layers * (1 - split.gpu_experts / shape.experts)  # layers of experts in DRAM
    expert_flops = 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width * shape.top_k * tokens
    flops = 2.0 * weights_of_others(shape) * 8 / shape.dense_bits * tokens + shape.moe_layers * expert_flops
    if split.repacked or engine.prompt.experts.value == "computed":
        on_cpu = away * expert_flops
        return (flops - on_cpu) / hardware.gpu.flops_per_s + on_cpu / hardware.cpu.flops_per_s
    pieces = -(-tokens // min(split.piece_tokens or engine.prompt.piece_tokens.value, tokens))
    copied = pieces * away / shape.moe_layers * shape.routed_bytes
    return flops / hardware.gpu.flops_per_s + copied / hardware.link.theory_bytes_per_s


def llmfit(row: MeasuredRow) -> Speeds:
    """0.8 / (active bytes in DRAM / its bandwidth + active bytes in GPU memory / (0.55 x its bandwidth)), of weights.

    From AlexsJones/llmfit, llmfit-core/src/fit.rs. It has no speed of prompts. Without a GPU all bytes are in DRAM.
    """
    hardware = machine_of(row.machine)
    read = token_bytes(shape_of(row), hardware, split_of(row), 0)
    reached = 1.0 if hardware.cpu_only else LLMFIT_GPU
    gpu_s = read.gpu_weights / (reached * hardware.gpu.bandwidth_bytes_per_s)
    return Speeds(LLMFIT_ALL / (read.cpu_weights / hardware.cpu.dram_bytes_per_s + gpu_s))
