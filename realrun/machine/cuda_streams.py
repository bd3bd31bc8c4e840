"""Work on CUDA streams: the lane that launches it, and completions made of events, timed on the host's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from realrun.errors import LaneError, LaneInputError
from realrun.machine.cuda_memory import memory_in_words
from realrun.machine.done_callbacks import DoneCallbacks
from realrun.machine.gpu_clock import GpuClock, new_event, new_stream
from realrun.machine.lanes import Completion, OnItsLane, Work
from realrun.machine.stream_flags import StreamFlag
from realrun.machine.thread_lane import ThreadCompletion
from trilane.common.errors import TrilaneError


class WorkTimes(NamedTuple):
    """When work was ready to start, started and ended, on the host's clock."""

    ready_ns: int
    start_ns: int
    end_ns: int


class StreamCompletion(OnItsLane):
    """Work between two events of a stream.

    It starts when the stream reaches it: if the stream is idle, launching is part of the time. Waiting spins without
    the interpreter lock.
    """

    def __init__(self, clock: GpuClock, asked_ns: int, after: Sequence[Completion], callbacks: DoneCallbacks) -> None:
        self._clock, self._base, self._asked_ns, self._after = clock, clock.base, asked_ns, after
        self._callbacks = callbacks
        self._callback: int | None = None  # its number
        self.blocked_ns = time.perf_counter_ns() - asked_ns
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = new_event(), new_event()
        self._times: WorkTimes | None = None
        self._lock = threading.Lock()
        self._is_over = False  # as far as is known

    ready_ns = property(lambda self: self.times().ready_ns)
    start_ns = property(lambda self: self.times().start_ns)  # when the stream reached it
    end_ns = property(lambda self: self.times().end_ns)

    def wait(self) -> None:
        """Block until it has ended and its ``done`` has been called."""
        self._synchronize()
        for completion in self._after:
            if isinstance(completion, ThreadCompletion):
                completion.wait()  # it has ended, or failed
        if self._callback is not None:
            self._callbacks.run(wait=True)
            self._callbacks.raise_error(self._callback)
        self._clock.refresh()

    def has_ended(self) -> bool:
        events = self._events
        self._is_over = self._is_over or events is None or bool(events[1].query())  # type: ignore[no-untyped-call]
        return self._is_over

    def times(self) -> WorkTimes:
        """Block until the work, but not its ``done``, has ended. Raises LaneError if the device reports an error."""
        with self._lock:
            if self._times is None:
                self._times = self._read()
                self._events, self._after = None, ()  # let go of what they hold
            return self._times

    def launch(self, stream: torch.cuda.Stream, work: Work, done: Work | None) -> None:
        """Call ``work`` with ``stream`` as the current one; it runs after all that it waits for on other streams."""
        assert self._events is not None
        start, end = self._events
        hold_up(stream, self._after)
        start.record(stream)
        work()
        end.record(stream)
        if done is not None:
            self._callback = self._callbacks.add(self.has_ended, done)

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for this work."""
        events = self._events
        if events is not None and not self._is_over:
            stream.wait_event(events[1])

    def _synchronize(self) -> None:
        events = self._events
        if events is not None:
            try:
                events[1].synchronize()
            except RuntimeError as error:
                raise LaneError(f"a lane has stopped: the GPU reports: {error}") from error
        self._is_over = True

    def _read(self) -> WorkTimes:
        self._synchronize()
        assert self._events is not None
        for completion in self._after:
            completion.wait()
        start, end = map(self._base.host_ns_of, self._events)
        ready = max((self._asked_ns, *(completion.end_ns for completion in self._after)))
        return WorkTimes(min(ready, start), start, end)


def hold_up(stream: torch.cuda.Stream, completions: Sequence[Completion]) -> None:
    """Make ``stream`` wait for all ``completions`` that have not ended.

    For work of a thread it waits for a flag in memory. A thread's work ends in order, so the last flag is enough. CUDA
    does not see that order, and requires events in addition for an order between streams (driver API,
    ``cuStreamWaitValue32``): so the stream also waits for what the thread waits for.
    """
    flags: dict[StreamFlag, int] = {}
    earlier: list[Completion] = []
    for completion in completions:
        if isinstance(completion, ThreadCompletion) and completion.flag is not None and not completion.has_ended():
            flags[completion.flag] = max(flags.get(completion.flag, 0), completion.number)
            earlier += completion.after
    for awaited in dict.fromkeys(each for each in (*completions, *earlier) if isinstance(each, StreamCompletion)):
        awaited.hold_up(stream)
    for flag, number in flags.items():
        flag.hold_up(stream, number)


def _can_hold_up(completion: Completion) -> bool:
    """Whether a stream can wait for it instead of the host."""
    return isinstance(completion, StreamCompletion) or (
        isinstance(completion, ThreadCompletion) and completion.flag is not None and not completion.has_ended()
    )


class StreamLane:
    """A CUDA stream as a lane. Work is launched by the submitting thread, one thread at a time.

    ``home``: the thread that has it as its current stream, which saves an estimated 8 us for each of its submissions.
    """

    def __init__(self, name: str, device: torch.device, clock: GpuClock, home: int | None = None) -> None:
        self.stream = new_stream(device)
        self.callbacks = DoneCallbacks()
        self._name, self._device, self._clock, self._home = name, device, clock, home
        self._error: LaneError | None = None

    def submit(self, work: Work, after: Sequence[Completion] = (), done: Work | None = None) -> StreamCompletion:
        """Launch ``work``. Blocks until ``after`` is issued, or has ended if a stream cannot wait for it.

        Raises LaneError if waiting or launching fails.
        """
        self._raise_error()
        asked_ns = time.perf_counter_ns()
        issued = [completion.issued() for completion in after]
        for earlier in issued:
            if not _can_hold_up(earlier):
                earlier.wait()
        completion = StreamCompletion(self._clock, asked_ns, issued, self.callbacks)
        self._launch(completion, work, done)
        return completion

    def settle(self) -> None:
        """Block until all has ended and every ``done`` has been called. Raises LaneError if something has failed."""
        self._raise_error()
        try:
            self.stream.synchronize()
        except RuntimeError as error:
            raise LaneError(f"the {self._name} lane has stopped: the GPU reports: {error}") from error
        self.callbacks.run(wait=True)
        self.callbacks.raise_error()

    def _launch(self, completion: StreamCompletion, work: Work, done: Work | None) -> None:
        try:
            with torch.inference_mode(), on_stream(self.stream, threading.get_ident() == self._home):
                completion.launch(self.stream, work, done)
        except Exception as error:
            full = isinstance(error, torch.OutOfMemoryError)
            why = f"out of GPU memory: {memory_in_words(self._device)}" if full else str(error)
            kind = LaneInputError if full or isinstance(error, TrilaneError) else LaneError
            self._error = kind(f"the {self._name} lane has stopped: {why}")
            raise self._error from error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def on_stream(stream: torch.cuda.Stream, is_current: bool) -> AbstractContextManager[object]:
    """In the block, ``stream`` is the current one; nothing is set if it is already."""
    return nullcontext() if is_current else torch.cuda.stream(stream)
