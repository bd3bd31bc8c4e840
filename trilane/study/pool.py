"""Processes that share the work of one question. What comes of it does not depend on how many there are."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from typing import Any, TypeAlias

Each: TypeAlias = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]  # map, or something like it


class WorkerError(ValueError):
    """A process ended before its work did."""


@contextmanager
def shared(jobs: int) -> Iterator[Each]:
    """A ``map`` over ``jobs`` processes, of which this is one; for one job, ``map`` itself.

    Others begin with the first items as soon as these are handed over; this one takes the last ones that nobody has
    begun, while it waits for a result.

    Functions go to other processes: those of a module, or partial ones. More than one job needs a caller that can be
    imported (``if __name__ == "__main__"``). Raises WorkerError if a process is ended by somebody else.
    """
    if jobs <= 1:
        yield map
        return
    with ProcessPoolExecutor(jobs - 1, get_context("spawn"), leave_interrupts_to_the_parent) as pool:
        try:
            yield lambda do, items: _mapped(pool, do, items)
        except BrokenProcessPool:
            raise WorkerError(
                "a process that shared the work has ended: if memory ran out, ask for fewer jobs; in a program of your "
                'own, ask for more than one under `if __name__ == "__main__":`'
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _mapped(pool: ProcessPoolExecutor, do: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    given = list(items)
    with interrupts_held():  # processes are started here
        futures = [pool.submit(do, item) for item in given]
    return _gathered(do, given, futures)


def _gathered(do: Callable[[Any], Any], given: Sequence[Any], futures: list[Future[Any]]) -> Iterator[Any]:
    """The results in their order."""
    last = len(futures)
    for place in range(len(futures)):
        while not futures[place].done() and last > place:
            last -= 1
            if futures[last].cancel():
                futures[last] = _done_here(do, given[last])
        yield futures[place].result()


def _done_here(do: Callable[[Any], Any], item: Any) -> Future[Any]:
    """An error waits for its turn, too."""
    future: Future[Any] = Future()
    try:
        future.set_result(do(item))
    except Exception as error:
        future.set_exception(error)
    return future


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A process that is started meanwhile never hears of Ctrl-C, from its first import on; ours waits until after."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # it would be started within, and lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_interrupts_to_the_parent() -> None:
    """For worker processes: Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
