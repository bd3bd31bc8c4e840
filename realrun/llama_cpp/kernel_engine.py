"""An engine file from measured kernels: on a machine with a GPU llama.cpp's numbers, without one the measured ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sim.costs.engine import InferenceEngine, load_engine
from sim.costs.kernels import Kernels
from trilane.common.files import atomic_path
from trilane.common.schema import to_dict

BASE = "llama.cpp"


def write_engine(kernels: Kernels, about: str, path: Path) -> InferenceEngine:
    """Write an engine ``like`` llama.cpp, aside first, and the engine as it is read back. Raises EngineError."""
    document: dict[str, Any] = {"about": about, "like": BASE, "kernels": _plain(to_dict(kernels))}
    with atomic_path(path) as aside:
        aside.write_text(yaml.dump(document, Dumper=_EngineDumper, sort_keys=False, default_flow_style=None, width=120))
        load_engine(str(aside))  # an engine that cannot be read leaves an earlier file as it was
    return load_engine(str(path))


class _EngineDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """What occurs twice is written twice: ``read_yaml`` takes no aliases."""
        return True


def _plain(value: Any) -> Any:
    """Numbers to five digits."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
