"""Lanes made of threads: a worker with cores and torch threads of its own, or the calling thread itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from realrun.errors import LaneError
from realrun.machine.lanes import Mark, Work


class ThreadMark:
    """Work that a thread does. A held lock stands for "not ended": waiting for it costs next to nothing."""

    __slots__ = ("_after", "_done", "_ended", "_work", "end_ns", "error", "held_ns", "ready_ns", "start_ns")

    def __init__(self, work: Work, after: Sequence[Mark], done: Work | None) -> None:
        self._work: Work | None = work
        self._after, self._done = after, done
        self.ready_ns, self.start_ns, self.end_ns = time.perf_counter_ns(), 0, 0
        self.held_ns = 0  # nobody: see ``Given``
        self.error: BaseException | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def issued(self) -> ThreadMark:
        """Itself: a thread's work is known from the beginning."""
        return self

    def wait(self) -> None:
        """Block until it has ended. Raises LaneError if it failed."""
        with self._ended:
            pass
        if self.error is not None:
            raise LaneError.of("a lane", self.error) from self.error

    def do(self, broken: BaseException | None) -> BaseException | None:
        """Do the work in this thread, unless the lane is broken; returns what broke it, if anything has."""
        try:
            if broken is not None:
                raise broken
            for mark in self._after:
                mark.wait()
                self.ready_ns = max(self.ready_ns, mark.end_ns)
            assert self._work is not None
            self.start_ns = time.perf_counter_ns()
            self._work()
            self.end_ns = time.perf_counter_ns()
            if self._done is not None:
                self._done()
        except BaseException as error:
            self.error = error
        self._work, self._after, self._done = None, (), None  # let go of what they hold
        self._ended.release()
        return self.error


class ThreadLane:
    """A worker thread. ``cores``: where it may run (None: anywhere); ``threads``: of torch's operations in it."""

    def __init__(self, name: str, cores: Collection[int] | None = None, threads: int = 1) -> None:
        self._queue: SimpleQueue[ThreadMark | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(cores, threads), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Sequence[Mark] = (), done: Work | None = None) -> ThreadMark:
        """See ``Lane.submit``."""
        mark = ThreadMark(work, after, done)
        self._queue.put(mark)
        return mark

    def close(self) -> None:
        """Let the thread end after what it has been given."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self, cores: Collection[int] | None, threads: int) -> None:
        settle_thread(cores, threads)
        broken: BaseException | None = None
        with torch.inference_mode():
            while (mark := self._queue.get()) is not None:
                broken = mark.do(broken)


class InlineLane:
    """The calling thread: ``submit`` returns when the work has ended."""

    def __init__(self) -> None:
        self._broken: BaseException | None = None

    def submit(self, work: Work, after: Sequence[Mark] = (), done: Work | None = None) -> ThreadMark:
        """See ``Lane.submit``. Raises LaneError if the work fails."""
        mark = ThreadMark(work, after, done)
        given_ns = mark.ready_ns
        self._broken = mark.do(self._broken)
        mark.wait()
        mark.held_ns = time.perf_counter_ns() - given_ns
        return mark


def settle_thread(cores: Collection[int] | None, threads: int) -> None:
    """Bind the calling thread to cores, where the system lets it, and set how many threads its torch operations use."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(threading.get_native_id(), cores)
    torch.get_num_threads()  # a thread asks for torch's number when it first works, and takes what any thread set last
    torch.set_num_threads(threads)


@contextmanager
def settled(core: int | None) -> Iterator[None]:
    """Bind the calling thread to ``core``, with one thread for torch, until the block ends; None: leave it alone."""
    if core is None:
        yield
        return
    cores = os.sched_getaffinity(threading.get_native_id()) if hasattr(os, "sched_getaffinity") else None
    threads = torch.get_num_threads()
    settle_thread((core,), 1)
    try:
        yield
    finally:
        settle_thread(cores, threads)
