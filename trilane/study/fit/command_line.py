"""Command lines of engines, with the arguments on which an answer rests."""

from __future__ import annotations

from pathlib import Path

from sim.costs.engine import InferenceEngine
from sim.costs.split_speed import StaticSplit
from traces.models.names import parted
from traces.models.shape import ModelShape
from trilane.study.fit.question import Question

LLAMA_BATCH = 2048  # llama.cpp's -b, from which -ub takes its pieces


def command_line(
    question: Question, shape: ModelShape, engine: InferenceEngine, split: StaticSplit, cpu_only: bool
) -> str:
    """What to type. The model's file or folder is named after it."""
    write = _ktransformers if engine.splits == "experts" else _llama_cpp
    return " ".join(write(question, shape, split, cpu_only))


def cpu_layers_of(shape: ModelShape, cpu_layers: int) -> int:
    """N of ``--n-cpu-moe``, which counts dense layers too: those of these models come first."""
    return cpu_layers + shape.dense_layers if cpu_layers else 0


def _llama_cpp(question: Question, shape: ModelShape, split: StaticSplit, cpu_only: bool) -> list[str]:
    layers, piece = cpu_layers_of(shape, split.cpu_layers), question.ubatch
    arguments = ["llama-server", f"-m {_gguf(shape)}", "-ngl 0" if cpu_only else "-ngl 99"]
    arguments += [f"--n-cpu-moe {layers}"] if layers else []
    arguments += [f"-c {question.batch * question.tokens}", "-fa on"]
    arguments += [f"-np {question.batch}"] if question.batch > 1 else []
    arguments += [f"-b {max(piece, LLAMA_BATCH)} -ub {piece}"] if piece else []
    arguments += [f"-t {question.threads}"] if question.threads else []
    return arguments + ([f"-ctk {question.kv} -ctv {question.kv}"] if question.kv else [])


def _ktransformers(question: Question, shape: ModelShape, split: StaticSplit, cpu_only: bool) -> list[str]:
    arguments = ["python -m sglang.launch_server", f"--model {_title(shape)}", f"--kt-weight-path {_title(shape)}"]
    arguments += [f"--kt-num-gpu-experts {split.gpu_experts if split.cpu_layers else shape.experts}"]
    arguments += [f"--context-length {question.tokens}"]
    arguments += [f"--chunked-prefill-size {question.ubatch}"] if question.ubatch else []
    return arguments + ([f"--kt-cpuinfer {question.threads}"] if question.threads else [])


def _gguf(shape: ModelShape) -> str:
    """The file that was given, or one named after the model and its weights."""
    given = parted(shape.name).model
    return given if given.lower().endswith(".gguf") else f"{_title(shape)}.gguf"


def _title(shape: ModelShape) -> str:
    """The model, for a configuration its folder, and its weights."""
    name = parted(shape.name)
    path = Path(name.model)
    title = path.parent.name if path.suffix == ".json" else name.model
    return "-".join(part for part in (title, name.weights) if part)
