"""Lanes made of threads: a worker with cores and torch threads of its own, or the calling thread itself."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from realrun.errors import LaneError
from realrun.machine.lanes import Completion, Work

PR_SET_TIMERSLACK = 29  # https://man7.org/linux/man-pages/man2/PR_SET_TIMERSLACK.2const.html


class Flag(Protocol):
    """Where a GPU stream sees how many pieces of a lane's work have ended."""

    def set(self, number: int) -> None:
        """All work up to ``number`` has ended."""
        ...

    def hold_up(self, stream: Any, number: int) -> None:
        """What ``stream`` is given from now on waits for ``number``."""
        ...


class ThreadCompletion:
    """Work that a thread does. A held lock stands for "not ended": waiting for it costs next to nothing.

    ``number``: of the work on its lane, from 1; ``flag``: the lane's, if GPU streams can wait for its work.
    """

    __slots__ = (
        "_done",
        "_ended",
        "_work",
        "after",
        "blocked_ns",
        "end_ns",
        "error",
        "flag",
        "number",
        "ready_ns",
        "start_ns",
    )  # fmt: skip

    def __init__(
        self, work: Work, after: Sequence[Completion], done: Work | None, number: int = 0, flag: Flag | None = None
    ) -> None:
        self._work: Work | None = work
        self.after, self._done = after, done
        self.number, self.flag = number, flag
        self.ready_ns, self.start_ns, self.end_ns = time.perf_counter_ns(), 0, 0
        self.blocked_ns = 0  # nobody: see ``Submitted``
        self.error: BaseException | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def issued(self) -> ThreadCompletion:
        """Itself: a thread's work is known from the beginning."""
        return self

    def wait(self) -> None:
        """Block until it has ended. Raises LaneError if it failed."""
        with self._ended:
            pass
        if self.error is not None:
            raise LaneError.of("a lane", self.error) from self.error

    def has_ended(self) -> bool:
        """See ``Completion``."""
        return not self._ended.locked()

    def do(self, broken: BaseException | None) -> BaseException | None:
        """Do the work in this thread, unless the lane is broken; returns what broke it, if anything has."""
        try:
            if broken is not None:
                raise broken
            for completion in self.after:
                completion.wait()
                self.ready_ns = max(self.ready_ns, completion.end_ns)
            assert self._work is not None
            self.start_ns = time.perf_counter_ns()
            self._work()
            self.end_ns = time.perf_counter_ns()
            if self._done is not None:
                self._done()
        except BaseException as error:
            self.error = error
        finally:
            if self.flag is not None:
                self.flag.set(self.number)  # after a failure too, or the streams that wait would never go on
        self._work, self.after, self._done = None, (), None  # let go of what they hold
        self._ended.release()
        return self.error


class ThreadLane:
    """A worker thread. ``cores``: where it may run (None: anywhere); ``threads``: of torch's operations in it.

    ``flag`` is set to the number of each piece of work once that has ended. Work is submitted by one thread.
    """

    def __init__(
        self, name: str, cores: Collection[int] | None = None, threads: int = 1, flag: Flag | None = None
    ) -> None:
        self._flag, self._submitted = flag, 0
        self._queue: SimpleQueue[ThreadCompletion | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(cores, threads), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Sequence[Completion] = (), done: Work | None = None) -> ThreadCompletion:
        """See ``MachineLane.submit``."""
        self._submitted += 1
        completion = ThreadCompletion(work, after, done, self._submitted, self._flag)
        self._queue.put(completion)
        return completion

    def close(self) -> None:
        """Let the thread end after what it has been given."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self, cores: Collection[int] | None, threads: int) -> None:
        settle_thread(cores, threads)
        broken: BaseException | None = None
        with torch.inference_mode():
            while (completion := self._queue.get()) is not None:
                broken = completion.do(broken)


class InlineLane:
    """The calling thread: ``submit`` returns when the work has ended."""

    def __init__(self) -> None:
        self._broken: BaseException | None = None

    def submit(self, work: Work, after: Sequence[Completion] = (), done: Work | None = None) -> ThreadCompletion:
        """See ``MachineLane.submit``. Raises LaneError if the work fails."""
        completion = ThreadCompletion(work, after, done)
        given_ns = completion.ready_ns
        self._broken = completion.do(self._broken)
        completion.wait()
        completion.blocked_ns = time.perf_counter_ns() - given_ns
        return completion


def wake_in_time() -> None:
    """Let the calling thread sleep for tens of microseconds: Linux lets sleeps last 50 us longer unless it is told."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


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
