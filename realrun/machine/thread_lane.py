"""Lanes made of threads: a worker thread with its own cores and torch threads, or the calling thread.

Also the settings of threads and of the interpreter with which lanes are timed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import torch

from realrun.errors import LaneError
from realrun.machine.cores import most_cpu_threads
from realrun.machine.cuda_memory import StreamFlag
from realrun.machine.lanes import Completion, OnItsLane, Work
from trilane.common.gc_paused import gc_paused

PR_SET_TIMERSLACK = 29  # https://man7.org/linux/man-pages/man2/PR_SET_TIMERSLACK.2const.html


class ThreadCompletion(OnItsLane):
    """Work of a thread. Its end is signalled by releasing a lock, the cheapest way to wait.

    ``number``: of the work on its lane, from 1; ``flag``: the lane's, if GPU streams can wait for its work.
    """

    def __init__(
        self, work: Work, after: Sequence[Completion], done: Work | None, number: int = 0,
        flag: StreamFlag | None = None,
    ) -> None:
        self._work: Work | None = work
        self.after, self._done = after, done
        self.number, self.flag = number, flag
        self.ready_ns, self.start_ns, self.end_ns = time.perf_counter_ns(), 0, 0
        self.blocked_ns = 0
        self.error: BaseException | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def wait(self) -> None:
        """Block until it has ended. Raises LaneError if it failed."""
        with self._ended:
            pass
        if self.error is not None:
            raise LaneError.of("a lane", self.error) from self.error

    def has_ended(self) -> bool:
        return not self._ended.locked()

    def do(self, broken: BaseException | None) -> BaseException | None:
        """Do the work in this thread, unless the lane is ``broken``; returns the error, if there is any."""
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
                self.flag.set(self.number)  # after a failure too, or waiting streams would never continue
        self._work, self.after, self._done = None, (), None  # release what they refer to
        self._ended.release()
        return self.error


class ThreadLane:
    """A worker thread. ``cores``: where it may run (None: anywhere); ``threads``: for torch's operations in it.

    ``flag`` is set to the number of each piece of work when it has ended. Work is submitted by one thread.
    """

    def __init__(
        self, name: str, cores: Collection[int] | None = None, threads: int = 1, flag: StreamFlag | None = None
    ) -> None:
        self._flag, self._submitted = flag, 0
        self._queue: SimpleQueue[ThreadCompletion | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(cores, threads), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Sequence[Completion] = (), done: Work | None = None) -> ThreadCompletion:
        self._submitted += 1
        completion = ThreadCompletion(work, after, done, self._submitted, self._flag)
        self._queue.put(completion)
        return completion

    def close(self) -> None:
        """End the thread after the work that has been submitted."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self, cores: Collection[int] | None, threads: int) -> None:
        settle_thread(cores, threads)
        broken: BaseException | None = None
        with torch.inference_mode():
            while (completion := self._queue.get()) is not None:
                broken = completion.do(broken)


class InlineLane:
    """The calling thread as a lane: ``submit`` returns when the work has ended."""

    def __init__(self) -> None:
        self._broken: BaseException | None = None

    def submit(self, work: Work, after: Sequence[Completion] = (), done: Work | None = None) -> ThreadCompletion:
        """As in ``MachineLane``. Raises LaneError if the work fails."""
        completion = ThreadCompletion(work, after, done)
        given_ns = completion.ready_ns
        self._broken = completion.do(self._broken)
        completion.wait()
        completion.blocked_ns = time.perf_counter_ns() - given_ns
        return completion


def wake_in_time() -> None:
    """Let the calling thread sleep for tens of microseconds only; by default Linux adds up to 50 us to a sleep."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def limit_torch_threads() -> None:
    """Let torch's operations in this thread use at most as many threads as CPU experts; more would compete for cores.

    By default torch uses all cores that it sees, without regard to the quota of a container.
    """
    torch.set_num_threads(min(torch.get_num_threads(), most_cpu_threads()))


def settle_thread(cores: Collection[int] | None, threads: int) -> None:
    """Bind the calling thread to cores, if the system can, and set the number of threads of its torch operations."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(threading.get_native_id(), cores)
    torch.get_num_threads()  # on its first use, a thread takes over the number that any thread set last
    torch.set_num_threads(threads)


@contextmanager
def settled(core: int | None) -> Iterator[None]:
    """Bind the calling thread to ``core`` in the block, with one torch thread; None: change nothing."""
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


# Instead of Python's 5 ms, since lanes hand over often. Compared with 1e-4, kernels that run while the host thread
# works take less time: forecasts on host lanes 0.9 instead of 1.4 ms a step.
SWITCH_INTERVAL_S = 1e-5


@contextmanager
def low_jitter() -> Iterator[None]:
    """Measure in the block: no garbage collection, which may take longer than a layer; fast thread switches; no
    autograd."""
    interval = sys.getswitchinterval()
    gc.collect()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with gc_paused(), torch.inference_mode():
            yield
    finally:
        sys.setswitchinterval(interval)
