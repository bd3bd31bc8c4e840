"""The size of host memory: in all, available, and within the limits of control groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Limit and usage of a control group: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html
CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
CACHE = ("inactive_file", "active_file")  # in memory.stat: used, but released on demand


class HostMemory(NamedTuple):
    """The system's figures; ``sys.maxsize`` for those that it does not give.

    ``available_bytes``: what programs can still use without swapping. ``allowed_bytes``: what control groups still
    allow this process, whether or not the machine's memory grows.
    """

    total_bytes: int
    available_bytes: int
    allowed_bytes: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The present figures. ``root``: of the system's files."""
    allowed = min(_allowances(root), default=sys.maxsize)
    total, available = _meminfo(root / "proc/meminfo")
    return HostMemory(total, min(available, allowed), allowed)


def gb(size_bytes: float) -> str:
    """A size in GB, for messages."""
    return f"{size_bytes / 1e9:.2f} GB"


def _meminfo(file: Path) -> tuple[int, int]:
    """Total and available bytes; on other systems than Linux from the numbers of pages."""
    if not file.exists():
        return _pages("SC_PHYS_PAGES"), _pages("SC_AVPHYS_PAGES")
    lines = (line.split() for line in file.read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines if words[0] in ("MemTotal:", "MemAvailable:")}
    return kib["MemTotal:"] * 1024, kib["MemAvailable:"] * 1024


def _pages(name: str) -> int:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows has no sysconf, macOS no figure of free pages
        return sys.maxsize


def _allowances(root: Path) -> Iterator[int]:
    """What each control group of this process still allows, if it has a limit."""
    for folder in _cgroups(root):
        for limit, used in CGROUP_FILES:
            if (folder / limit).exists() and (text := (folder / limit).read_text().strip()) != "max":
                stat = folder / "memory.stat"
                pairs = (line.split() for line in stat.read_text().splitlines()) if stat.exists() else ()
                released_bytes = sum(int(size) for name, size in pairs if name in CACHE)
                yield max(0, int(text) - int((folder / used).read_text()) + released_bytes)


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders that may have limits: the process's own group and all groups around it, up to a container's top."""
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            own = top / path.strip("/")
            yield from (own, *(folder for folder in own.parents if folder.is_relative_to(top)))
