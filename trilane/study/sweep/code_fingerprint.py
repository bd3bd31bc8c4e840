"""Which code plays: a checksum, so that results of an edited policy are never taken for those of the new one."""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

_PLAYING = ("traces", "policies", "sim")
_SOURCES = (".py", ".yaml")
NOT_PLAYING = ("traces/capture/*",)  # it records traces: no simulation follows from it


@lru_cache(maxsize=1)
def source_checksum() -> str:
    """Of the files that a simulation may follow from: code and numbers of traces, policies and simulator."""
    return checksum_of([Path(str(files(package))) for package in _PLAYING])


def checksum_of(folders: list[Path]) -> str:
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
        for folder in folders for path in folder.rglob("*") if path.suffix in _SOURCES
    }  # fmt: skip
    return {name: path for name, path in found.items() if not any(fnmatchcase(name, left) for left in NOT_PLAYING)}
