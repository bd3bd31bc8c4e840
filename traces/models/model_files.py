"""Models given as a file: a config.json, a folder that holds one, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from traces.models.hf_config import read_config
from traces.models.shape import ModelShape, ShapeError

_CONFIG, _GGUF = "config.json", ".gguf"


def model_file(name: str) -> Path | None:
    """The file that ``name`` stands for, if it is a path. Raises ShapeError if there is no such file."""
    if not name:
        return None  # "" would be the current folder
    path = Path(name)
    if path.is_dir() and (path / _CONFIG).is_file():
        return path / _CONFIG
    if path.suffix.lower() not in (".json", _GGUF) and not path.is_dir():
        return None
    if not path.is_file():
        raise ShapeError(f"{name}: expected a config.json, a folder that holds one, or a GGUF file; there is none")
    return path


def read_model_file(path: Path) -> ModelShape:
    """The shape of the model in a file; its name is the path. Raises ShapeError."""
    try:
        if path.suffix.lower() != _GGUF:
            return read_config(path)
        from traces.models.gguf_model import read_gguf_model  # it takes long to import

        return read_gguf_model(path)
    except OSError as fault:
        raise ShapeError(f"{path}: {fault.strerror}") from None
