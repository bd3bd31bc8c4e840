"""Whether experts fit into host memory: by the figure that was given, or else by what there is.

There are virtual machines whose memory grows as it is touched. Before anything is refused, memory is therefore touched
step by step, as long as the machine grows, and given back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from realrun.errors import RefusedError
from realrun.machine.host_memory import HostMemory, gb, host_memory
from realrun.machine.pages import Pages

OPTION = "--host-memory-gb"
VARIABLE = "TRILANE_HOST_MEMORY_GB"

# Choices, so that a refusal takes seconds and other programs keep their memory:
STEP_BYTES = 10**9
RESERVE_BYTES = 5 * 10**8  # available memory that is never touched
STILL_BYTES = 16 * 10**9  # touched since the machine last grew: it does not grow
RETRIES, PAUSE_S = 3, 1.0  # of a machine that may need time to grow


class _Given(NamedTuple):
    available_bytes: int
    by: str


_given: ContextVar[_Given | None] = ContextVar("_given", default=None)


@contextmanager
def host_memory_given(size_gb: float | None) -> Iterator[None]:
    """Meanwhile, experts may take ``size_gb`` (10^9 bytes) of host memory, whatever is measured; None: no change.

    Raises RefusedError for what is not above 0.
    """
    token = _given.set(_given.get() if size_gb is None else _Given(_size_bytes(size_gb, OPTION), OPTION))
    try:
        yield
    finally:
        _given.reset(token)


def check_host_memory(needed_bytes: int, measure: Callable[[int], int] | None = None) -> None:
    """Raises RefusedError, saying by how much, where the host's memory does not hold ``needed_bytes``.

    The option goes before the environment variable, and that before ``measure`` (default: ``touched_bytes``).
    """
    given = _given.get() or _by_environment()
    available = (measure or touched_bytes)(needed_bytes) if given is None else given.available_bytes
    short = needed_bytes - available
    if short > 0:
        raise RefusedError(
            f"experts need {gb(needed_bytes)} of host memory, {gb(available)} are "
            f"{f'given by {given.by}' if given else 'free'}: {gb(short)} short. "
            "Close other programs, or take a smaller model, fewer layers or a smaller type; where memory grows as it "
            f"is used, say how much there is: {OPTION}, or {VARIABLE}, in GB (10^9 bytes)"
        )


def touched_bytes(
    needed_bytes: int,
    read: Callable[[], HostMemory] = host_memory,
    take: Callable[[int], object] = Pages,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Bytes available now or, where they are fewer than needed, once memory that grows has been touched.

    Touches no more than what is available less a reserve, and nothing where a control group's limit is in the way.
    """
    now, still_bytes = read(), 0
    held: list[object] = []

    def in_all(rest_bytes: int) -> int:
        return len(held) * STEP_BYTES + rest_bytes

    while in_all(now.available_bytes) < needed_bytes <= in_all(now.allowed_bytes) and still_bytes < STILL_BYTES:
        before = now
        if now.available_bytes >= STEP_BYTES + RESERVE_BYTES:
            held.append(take(STEP_BYTES))
            now = read()
        elif (now := _later(now, read, pause)).total_bytes <= before.total_bytes:
            break
        still_bytes = 0 if now.total_bytes > before.total_bytes else still_bytes + STEP_BYTES
    return in_all(now.available_bytes)


def _later(before: HostMemory, read: Callable[[], HostMemory], pause: Callable[[float], None]) -> HostMemory:
    """Once the machine has grown, or has had the time to."""
    for _ in range(RETRIES):
        pause(PAUSE_S)
        if (now := read()).total_bytes > before.total_bytes:
            break
    return now


def _by_environment() -> _Given | None:
    text = os.environ.get(VARIABLE)
    return None if text is None else _Given(_size_bytes(text, VARIABLE), VARIABLE)


def _size_bytes(size_gb: float | str, by: str) -> int:
    try:
        number = float(size_gb)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise RefusedError(f"{by}: expected a number of GB (10^9 bytes) above 0, got {size_gb!r}")
    return round(number * 1e9)
