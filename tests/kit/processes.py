"""Other processes, as Linux shows them, waiting for them, and a disk that is soon full."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.study.sweep.grid import Point


def children_of(pid: int) -> list[int]:
    """Children of a process that may have ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid: int) -> bool:
    """True if there is such a process, and it has not ended yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Until it is true, or the test fails."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def in_session(leader: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _parent, _group, session = entry.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(entry.parent.name))
    return found


# --- waiting for what another process does ----------------------------------------------------------------------------

LIMIT_S = 60.0


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Look until ``is_so``. Raises TimeoutError, with ``what`` was expected, after ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"expected within {limit_s:g} s: {what}")
        time.sleep(0.02)


# --- a disk that is soon full -----------------------------------------------------------------------------------------

@contextmanager
def small_disk(size: int = 1_000) -> Iterator[None]:
    """In the block, this process can write no file of more than ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- a point that keeps a worker busy for an hour ---------------------------------------------------------------------

@dataclass(frozen=True)
class Endless(Point):
    """Once it is in another process than ``home``, it says which, and stays."""

    home: int = 0

    def __reduce__(self) -> Any:
        return stay, (self.home,)


def stay(home: int) -> None:
    """Unpickle an endless point."""
    if os.getpid() != home:
        print(f"{os.getpid()}\n", end="", flush=True)  # in one piece, since another one prints at the same time
        time.sleep(3600)
