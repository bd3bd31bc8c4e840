"""An engine file from measured kernels, of a CPU or of a GPU next to it: for the other machines llama.cpp's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from sim.costs.engine import InferenceEngine, load_engine
from sim.costs.kernels import Kernels, SplitKernels
from trilane.common.files import atomic_path
from trilane.common.schema import to_dict
from trilane.common.yaml_files import yaml_text

BASE = "llama.cpp"


class GpuNumbers(NamedTuple):
    """What was measured on a machine with a GPU."""

    gpu_kernels: Kernels
    split: SplitKernels


def write_engine(measured: Kernels | GpuNumbers, about: str, path: Path) -> InferenceEngine:
    """Write an engine ``like`` llama.cpp, aside first, and the engine as it is read back. Raises EngineError."""
    sections = measured._asdict() if isinstance(measured, GpuNumbers) else {"kernels": measured}
    plain = {name: _plain(to_dict(section)) for name, section in sections.items()}
    with atomic_path(path) as aside:
        aside.write_text(yaml_text({"about": about, "like": BASE, **plain}))
        load_engine(str(aside))  # an engine that cannot be read leaves an earlier file as it was
    return load_engine(str(path))


def _plain(value: Any) -> Any:
    """Numbers to five digits."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
