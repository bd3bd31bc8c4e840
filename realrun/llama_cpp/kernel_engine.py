"""Measured kernels as an engine: the times that follow from them, and an engine file that is like llama.cpp's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.costs.engine import InferenceEngine, load_engine
from sim.costs.kernel_costs import Kernels, KernelSteps, SplitKernels
from traces.models.shape import ExpertWork
from trilane.common.files import atomic_path
from trilane.common.schema import to_dict
from trilane.common.yaml_files import yaml_text


def piece_ns(steps: KernelSteps, tokens: int, context: int) -> float:
    """Time in ns of a piece of ``tokens`` tokens of one sequence, which has ``context`` tokens after it.

    After the attention of the last layer, llama.cpp continues with the piece's last token alone.
    """
    costs, layers = steps.step(tokens, (context,)), steps.shape.moe_layers - 1
    mixture, of_one = (_mixture_ns(steps, count) for count in (tokens, 1))
    return (layers + 1) * costs.attention_ns + layers * mixture + of_one + costs.dense_ns + costs.head_ns


def routed_ns(steps: KernelSteps, tokens: int) -> float:
    """Time in ns of a layer's routed experts for ``tokens`` tokens."""
    work = ExpertWork.of(steps.shape, tokens)
    [expert_ns] = steps.expert_ns(np.array([work.rows]))
    return work.active * float(expert_ns)


def _mixture_ns(steps: KernelSteps, tokens: int) -> float:
    """Time in ns of a layer's gate, shared and routed experts, and of their sum."""
    step = steps.step(tokens, (tokens,))
    return step.gate_ns + step.shared_ns + step.combine_ns + routed_ns(steps, tokens)


BASE = "llama.cpp"


class GpuNumbers(NamedTuple):
    """Kernels of a machine with a GPU: the GPU's, and those of experts on the CPU next to it."""

    gpu_kernels: Kernels
    split: SplitKernels


def write_engine(measured: Kernels | GpuNumbers, about: str, path: Path) -> InferenceEngine:
    """Write an engine file ``like`` llama.cpp, atomically; the engine as it is read back. Raises EngineError."""
    sections = measured._asdict() if isinstance(measured, GpuNumbers) else {"kernels": measured}
    plain = {name: _plain(to_dict(section)) for name, section in sections.items()}
    with atomic_path(path) as aside:
        aside.write_text(yaml_text({"about": about, "like": BASE, **plain}))
        load_engine(str(aside))  # an engine that cannot be read leaves an earlier file as it was
    return load_engine(str(path))


def _plain(value: Any) -> Any:
    """The value with its numbers rounded to five digits, and lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
