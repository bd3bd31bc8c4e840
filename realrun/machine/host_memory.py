"""The size of host memory, in all, available and within the limits of control groups; and whether experts fit in it.

They are checked by the size that the user gave, or by measuring what is available. Some virtual machines are given more
memory as they touch what they have. On these, memory is touched in steps as long as the machine grows, and given back.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from realrun.errors import RefusedError
from realrun.machine.pinned import Pages
from trilane.common.quoting import quoted
from trilane.common.units import gb

# Limit and usage of a control group: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html
CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
CACHE = ("inactive_file", "active_file")  # in memory.stat: used, but released on demand


class HostMemory(NamedTuple):
    """The system's figures.

    ``available_bytes``: what programs can still use without swapping. ``allowed_bytes``: what control groups still
    allow this process, whether or not the machine's memory grows; ``sys.maxsize`` without a limit.
    """

    total_bytes: int
    available_bytes: int
    allowed_bytes: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The present figures. ``root``: of the files of control groups."""
    allowed = min(_allowances(root), default=sys.maxsize)
    system = psutil.virtual_memory()
    return HostMemory(system.total, min(system.available, allowed), allowed)


def _allowances(root: Path) -> Iterator[int]:
    """Bytes that each control group of this process still allows, if it has a limit."""
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


OPTION = "--host-memory-gb"
VARIABLE = "TRILANE_HOST_MEMORY_GB"

# Chosen so that a refusal takes seconds and other programs keep their memory:
STEP_BYTES = 10**9
RESERVE_BYTES = 5 * 10**8  # available memory that is never touched
STILL_BYTES, STILL_S = 16 * 10**9, 10.0  # touched, or waited, without growth: the machine does not grow
RETRIES, PAUSE_S = 3, 1.0  # when little is left, for a machine that needs time to grow


@dataclass
class GrowingMemory:
    """One measurement of available memory. What it has touched is freed together with this object."""

    read: Callable[[], HostMemory] = host_memory
    take: Callable[[int], object] = Pages
    pause: Callable[[float], None] = time.sleep
    clock_s: Callable[[], float] = time.monotonic
    _held: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._now = self.read()
        self._held_at_growth, self._growth_s = 0, self.clock_s()

    def available_bytes(self, needed_bytes: int) -> int:
        """Available memory: at once, or, if that is less than needed, after memory has been touched.

        Never touches more than what is available less a reserve, and nothing where a control group sets the limit.
        """
        while self._with_held(self._now.available_bytes) < needed_bytes <= self._with_held(self._now.allowed_bytes):
            touched_bytes = (len(self._held) - self._held_at_growth) * STEP_BYTES
            stands_still = touched_bytes >= STILL_BYTES or self.clock_s() - self._growth_s >= STILL_S
            if stands_still or not self._step():
                break
        return self._with_held(self._now.available_bytes)

    def _with_held(self, rest_bytes: int) -> int:
        return len(self._held) * STEP_BYTES + rest_bytes

    def _step(self) -> bool:
        """Touch one more step or, if little is left, wait for the machine to grow; False if it has not grown."""
        if self._now.available_bytes < STEP_BYTES + RESERVE_BYTES:
            return any(self._grows_meanwhile() for _ in range(RETRIES))
        self._held.append(self.take(STEP_BYTES))
        self._look()
        return True

    def _grows_meanwhile(self) -> bool:
        self.pause(PAUSE_S)
        return self._look()

    def _look(self) -> bool:
        """Read the present figures; True if the machine has grown since the last look."""
        before, self._now = self._now, self.read()
        grown = self._now.total_bytes > before.total_bytes
        if grown:
            self._held_at_growth, self._growth_s = len(self._held), self.clock_s()
        return grown


class _Given(NamedTuple):
    available_bytes: int
    by: str


_given: ContextVar[_Given | None] = ContextVar("_given", default=None)


@contextmanager
def host_memory_given(size_gb: float | None) -> Iterator[None]:
    """Let experts take ``size_gb`` (10^9 bytes) of host memory in the block, without measuring; None: no change.

    Raises RefusedError unless the size is above 0.
    """
    token = _given.set(_given.get() if size_gb is None else _Given(_size_bytes(size_gb, OPTION), OPTION))
    try:
        yield
    finally:
        _given.reset(token)


def check_host_memory(needed_bytes: int, measure: Callable[[int], int] | None = None) -> None:
    """Check that host memory holds ``needed_bytes``: by the option, else the environment variable, else ``measure``
    (None: see ``GrowingMemory``).

    Raises RefusedError, which says how much is missing.
    """
    text = os.environ.get(VARIABLE)
    given = _given.get() or (None if text is None else _Given(_size_bytes(text, VARIABLE), VARIABLE))
    available = given.available_bytes if given else (measure or GrowingMemory().available_bytes)(needed_bytes)
    short = needed_bytes - available
    if short > 0:
        raise RefusedError(
            f"experts need {gb(needed_bytes)} of host memory, {gb(available)} are "
            f"{f'given by {given.by}' if given else 'free'}: {gb(short)} short. "
            "Close other programs, or choose a smaller model, fewer layers or a smaller type; on a machine whose "
            f"memory grows with use, give its size: {OPTION}, or {VARIABLE}, in GB (10^9 bytes)"
        )


def _size_bytes(size_gb: float | str, by: str) -> int:
    try:
        number = float(size_gb)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise RefusedError(f"{by}: expected a number of GB (10^9 bytes) above 0, got {quoted(size_gb)}")
    return round(number * 1e9)
