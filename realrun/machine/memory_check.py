"""Whether experts fit into host memory: by the figure that was given, or else by what there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from realrun.errors import RefusedError
from realrun.machine.growing_memory import GrowingMemory
from realrun.machine.host_memory import gb

OPTION = "--host-memory-gb"
VARIABLE = "TRILANE_HOST_MEMORY_GB"


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


def measured_bytes(needed_bytes: int) -> int:
    """Of host memory that is there; see ``GrowingMemory``."""
    return GrowingMemory().available_bytes(needed_bytes)


def check_host_memory(needed_bytes: int, measure: Callable[[int], int] = measured_bytes) -> None:
    """Raises RefusedError, saying by how much, where the host's memory does not hold ``needed_bytes``.

    The option goes before the environment variable, and that before ``measure``.
    """
    given = _given.get() or _by_environment()
    available = measure(needed_bytes) if given is None else given.available_bytes
    short = needed_bytes - available
    if short > 0:
        raise RefusedError(
            f"experts need {gb(needed_bytes)} of host memory, {gb(available)} are "
            f"{f'given by {given.by}' if given else 'free'}: {gb(short)} short. "
            "Close other programs, or take a smaller model, fewer layers or a smaller type; where memory grows as it "
            f"is used, say how much there is: {OPTION}, or {VARIABLE}, in GB (10^9 bytes)"
        )


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
