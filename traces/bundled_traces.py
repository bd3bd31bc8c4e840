"""Bundled traces: their names, and the files of traces that are named or given as a path."""

from __future__ import annotations

from pathlib import Path

from traces.layout import TraceError
from trilane.common.names import unknown
from trilane.common.quoting import quoted

FOLDER = Path(__file__).parent / "bundled"
CALIBRATION = "-calibration"
_COMPANIONS = (CALIBRATION, "-vectors")  # endings of files that belong to a trace


def trace_names() -> list[str]:
    """Bundled traces for evaluation; each may come with a calibration trace of other prompts."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors") if not path.stem.endswith(_COMPANIONS))


def bundled_trace(model: str) -> str | None:
    """The first bundled trace of a model: of that name, or ``<model>-<anything>``."""
    return next((trace for trace in trace_names() if trace == model or trace.startswith(f"{model}-")), None)


def find_trace(name_or_path: str | Path) -> Path:
    """The file of a bundled trace, or of a path. Raises TraceError naming the bundled ones."""
    bundled = FOLDER / f"{name_or_path}.safetensors"
    if bundled.is_file():
        return bundled
    path = Path(name_or_path)
    if path.suffix.lower() == ".csv" and path.is_file():
        raise TraceError(
            f"{path}: expected a trace file, this is a CSV; import it first: "
            f"trilane trace import {path} -o {path.with_suffix('').name}.safetensors"
        )
    if path.is_file():
        return path
    raise TraceError(
        f"no file {quoted(str(name_or_path))}, and {unknown('bundled trace', str(name_or_path), trace_names())}"
    )
