"""Processes that share the work of one question. What comes of it does not depend on how many there are."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeAlias

Each: TypeAlias = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]  # map, or something like it


@contextmanager
def shared(jobs: int) -> Iterator[Each]:
    """A ``map`` over ``jobs`` processes; for one job, ``map`` itself.

    Functions go to other processes: those of a module, or partial ones. More than one job needs a caller that can be
    imported (``if __name__ == "__main__"``).
    """
    if jobs <= 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), leave_interrupts_to_the_parent) as pool:
        try:
            yield pool.map
        finally:
            pool.shutdown(cancel_futures=True)


def leave_interrupts_to_the_parent() -> None:
    """For worker processes: Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
