"""Traces by name: those that come with the package, or a file of the reader's own."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from traces.names import unknown
from traces.trace import Trace
from traces.trace_file import read_trace
from traces.trace_layout import TraceError

FOLDER = Path(__file__).parent / "bundled"
_CALIBRATION = "-calibration"
_BESIDE = (_CALIBRATION, "-vectors")  # files that belong to a trace


def trace_names() -> list[str]:
    """Bundled traces for evaluation; each may have a calibration trace beside it, made from other prompts."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors") if not path.stem.endswith(_BESIDE))


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
    raise TraceError(f"no file {str(name_or_path)!r}, and {unknown('bundled trace', str(name_or_path), trace_names())}")


def load_trace(name_or_path: str | Path) -> Trace:
    """Read a trace by name or path; read once while the file stays as it is."""
    path = find_trace(name_or_path).resolve()
    return _read(path, path.stat().st_mtime_ns)


def calibration_of(name: str) -> str | None:
    """The name of the calibration trace that belongs to a bundled trace, if there is one."""
    wanted = f"{name}{_CALIBRATION}"
    return wanted if (FOLDER / f"{wanted}.safetensors").is_file() else None


@lru_cache(maxsize=8)
def _read(path: Path, changed_ns: int) -> Trace:
    return read_trace(path)
