"""Command lines of engines, with the arguments on which an answer rests.

Dialects of 2025 are what builds from the spring to August 2025 take: ``--n-cpu-moe`` came in that month (llama.cpp PR
15077, ik_llama.cpp PR 672), ``-fa on`` in place of ``-fa`` later (PRs 15434 and 944). Since then ik_llama.cpp fuses a
mixture's products and uses the latent cache without being told (PRs 863 and 943). KTransformers' are those of
kt-kernel/README.md. On several cards ik_llama.cpp's ``--n-cpu-moe`` takes the last layers of each (its PR 1464), so
that the first layers of all are named.
"""

from __future__ import annotations

from pathlib import Path

from sim.costs.engine import Dialect, FittedEngine
from sim.costs.processors import layer_kind
from sim.machine.hardware import Hardware
from traces.models.names import parted
from traces.models.shape import ModelShape
from trilane.common.units import GIB
from trilane.engines.parallel import expert_parallel
from trilane.engines.question import Question
from trilane.engines.split_speed import StaticSplit
from trilane.engines.vllm_memory import UTILIZATION

_OF_2025 = ("llama-2025", "ik-2025")
LLAMA_BATCH = 2048  # llama.cpp's -b, from which -ub takes its pieces
_KT_METHODS = {"bf16": "BF16", "fp8": "FP8", "int4": "RAWINT4", "gptq": "GPTQ_INT4", "mxfp4": "MXFP4"}  # others: GGUF


def command_words(
    question: Question, shape: ModelShape, engine: FittedEngine, split: StaticSplit, hardware: Hardware
) -> list[str]:
    """Return what to type, each argument with its value. The model's file or folder is named after it."""
    if engine.dialect == "sglang":
        return _ktransformers(question, shape, split, hardware)
    if engine.dialect == "vllm-serve":
        return _vllm(question, shape, split, len(hardware.cards))
    return _llama_cpp(question, shape, split, hardware.cpu_only, engine.dialect)


def cpu_layers_of(shape: ModelShape, cpu_layers: int) -> int:
    """N of ``--n-cpu-moe``, which counts blocks without experts, too."""
    return shape.expert_blocks[cpu_layers - 1] + 1 if cpu_layers else 0


def _llama_cpp(
    question: Question, shape: ModelShape, split: StaticSplit, cpu_only: bool, dialect: Dialect
) -> list[str]:
    layers, early = cpu_layers_of(shape, split.cpu_layers), dialect in _OF_2025
    arguments = ["llama-server", f"-m {_gguf(shape)}", "-ngl 0" if cpu_only else "-ngl 99"]
    arguments += _over_cards(split) if split.by_card else []
    named = early or (split.by_card is not None and dialect == "ik")
    arguments += [_on_cpu(layers) if named else f"--n-cpu-moe {layers}"] if layers else []
    arguments += [f"-c {question.batch * question.tokens}", "-fa" if early else "-fa on"]
    arguments += _ik_2025(shape) if dialect == "ik-2025" else []
    arguments += [f"-np {question.batch}"] if question.batch > 1 else []
    arguments += _pieces(question.ubatch) if question.ubatch else []
    arguments += ["-rtr"] if split.repacked else []
    arguments += [f"-t {question.threads}"] if question.threads else []
    return arguments + ([f"-ctk {question.kv} -ctv {question.kv}"] if question.kv else [])


def _over_cards(split: StaticSplit) -> list[str]:
    """Blocks or proportions of each card; on the first alone, the others are not used."""
    by_card = split.by_card or ()
    return [f"-sm {split.mode} -ts {','.join(map(str, by_card))}"] if any(by_card[1:]) else ["-sm none -mg 0"]


def _pieces(ubatch: int) -> list[str]:
    """Batches of whole pieces: what is left of one would be a piece of its own."""
    return [f"-b {max(LLAMA_BATCH // ubatch, 1) * ubatch}", f"-ub {ubatch}"]


def _on_cpu(layers: int) -> str:
    """The experts of the first layers on the CPU, as builds without ``--n-cpu-moe`` take it."""
    tens, ones = divmod(layers - 1, 10)
    numbers = [*(f"{ten or ''}[0-9]" for ten in range(tens)), f"{tens or ''}[0-{ones}]"]
    return rf"-ot 'blk\.({'|'.join(numbers)})\.ffn_.*_exps\.=CPU'"


def _ik_2025(shape: ModelShape) -> list[str]:
    latent = any(layer_kind(kind) == "latent" for kind, _ in shape.attention_counts)
    return ["-fmoe", *(["-mla 3"] if latent else [])]


def _ktransformers(question: Question, shape: ModelShape, split: StaticSplit, hardware: Hardware) -> list[str]:
    name = parted(shape.name)
    method = _KT_METHODS.get(name.weights or "bf16", "LLAMAFILE")
    own = _title(str(name._replace(weights=None))) if method == "LLAMAFILE" else _title(shape.name)
    return [
        "python -m sglang.launch_server", f"--model {own}", f"--kt-weight-path {_title(shape.name)}",
        f"--kt-method {method}", f"--kt-cpuinfer {question.threads or hardware.cpu.cores}",
        f"--kt-threadpool-count {question.sockets or 1}",
        f"--kt-num-gpu-experts {split.gpu_experts if split.cpu_layers else shape.experts}",
        *([f"--tensor-parallel-size {len(hardware.cards)}"] if hardware.further else []),
        f"--context-length {question.tokens}", f"--chunked-prefill-size {split.piece_tokens}",
    ]


def _vllm(question: Question, shape: ModelShape, split: StaticSplit, cards: int) -> list[str]:
    offloaded = sum(shape.expert_bytes_by_layer[: split.cpu_layers]) * shape.experts // cards  # of each card
    return [
        f"vllm serve {_title(shape.name)}", *([f"--tensor-parallel-size {cards}"] if cards > 1 else []),
        *(["--enable-expert-parallel"] if cards > 1 and expert_parallel(shape, cards) else []),
        f"--max-model-len {question.tokens}", f"--max-num-seqs {question.batch}",
        f"--max-num-batched-tokens {split.piece_tokens}", f"--gpu-memory-utilization {UTILIZATION}",
        *([f"--cpu-offload-gb {-(-offloaded // GIB)} --cpu-offload-params experts"] if offloaded else []),
    ]


def _gguf(shape: ModelShape) -> str:
    """The file that was given, or one named after the model and its weights."""
    given = parted(shape.name).model
    return given if given.lower().endswith(".gguf") else f"{_title(shape.name)}.gguf"


def _title(model: str) -> str:
    """The model, for a configuration its folder, and its weights."""
    name = parted(model)
    path = Path(name.model)
    title = path.parent.name if path.suffix == ".json" else name.model
    return "-".join(part for part in (title, name.weights) if part)
