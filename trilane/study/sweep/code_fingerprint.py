"""A checksum of the code that simulations follow from: results of edited code are never taken for new ones."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path

_PACKAGES = ("policies", "sim", "traces", "trilane.common", "trilane.machines")
_SUFFIXES = (".py", ".yaml")
_LEFT_OUT = "traces/capture/"  # it records traces: no simulation follows from it


@cache
def code_fingerprint() -> str:
    """Of the code and the numbers of traces, policies and simulator, and of what they import."""
    return fingerprint_of([Path(str(files(package))) for package in _PACKAGES])


def fingerprint_of(folders: list[Path]) -> str:
    """Of names and contents of the sources in some folders and below."""
    digest = hashlib.sha256()
    for name, path in sorted(sources_in(folders).items()):
        digest.update(f"{name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sources_in(folders: list[Path]) -> dict[str, Path]:
    """The files that count, by their names from the folder on."""
    found = {
        f"{folder.name}/{path.relative_to(folder).as_posix()}": path
        for folder in folders for path in folder.rglob("*") if path.suffix in _SUFFIXES
    }  # fmt: skip
    return {name: path for name, path in found.items() if not name.startswith(_LEFT_OUT)}
