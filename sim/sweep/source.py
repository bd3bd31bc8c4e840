"""Which code plays: a checksum, so that results of an edited policy are never taken for those of the new one."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

_PLAYING = ("traces", "policies", "sim")
_SOURCES = (".py", ".yaml")


@lru_cache(maxsize=1)
def source_checksum() -> str:
    """Of the files that a simulation follows from: code and numbers of traces, policies and simulator."""
    return checksum_of([Path(str(files(package))) for package in _PLAYING])


def checksum_of(folders: list[Path]) -> str:
    """Of names and contents of the sources in some folders and below."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
