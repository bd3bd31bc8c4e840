"""Work on CUDA streams: the lane that launches it, and completions made of events, timed on the host's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from realrun.errors import LaneError
from realrun.machine.cuda_memory import memory_in_words
from realrun.machine.done_callbacks import DoneCallback, DoneCallbacks
from realrun.machine.gpu_clock import GpuClock, new_event, new_stream
from realrun.machine.lanes import Completion, Work
from realrun.machine.thread_lane import Flag, ThreadCompletion


class WorkTimes(NamedTuple):
    """When work could have started, started and ended, on the host's clock."""

    ready_ns: int
    start_ns: int
    end_ns: int


class StreamCompletion:
    """Work between two events of a stream.

    The start is when the stream reached the work: where it had nothing else to do, launching is part of the time.
    Waiting spins without the interpreter lock.
    """

    def __init__(self, clock: GpuClock, asked_ns: int, after: Sequence[Completion], callbacks: DoneCallbacks) -> None:
        self._clock, self._base, self._asked_ns, self._after = clock, clock.base, asked_ns, after
        self._callbacks = callbacks
        self._callback: DoneCallback | None = None
        self.blocked_ns = time.perf_counter_ns() - asked_ns  # see ``Submitted``
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = new_event(), new_event()
        self._times: WorkTimes | None = None
        self._lock = threading.Lock()
        self._is_over = False  # as far as is known

    @property
    def ready_ns(self) -> int:
        """See ``Completion``."""
        return self.times().ready_ns

    @property
    def start_ns(self) -> int:
        """See ``Completion``."""
        return self.times().start_ns

    @property
    def end_ns(self) -> int:
        """See ``Completion``."""
        return self.times().end_ns

    def issued(self) -> StreamCompletion:
        """Itself: it is launched as soon as it exists."""
        return self

    def wait(self) -> None:
        """See ``Completion``."""
        self._synchronize()
        for completion in self._after:
            if isinstance(completion, ThreadCompletion):
                completion.wait()  # it has ended, or failed
        if self._callback is not None:
            self._callbacks.run(wait=True)
            if self._callback.error is not None:
                self._callbacks.raise_error()
        self._clock.refresh()

    def has_ended(self) -> bool:
        """See ``Completion``."""
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
        """Do ``work`` with ``stream`` as the current one; it runs once all it waits for on other streams has ended."""
        assert self._events is not None
        start, end = self._events
        hold_up(stream, self._after)
        start.record(stream)
        work()
        end.record(stream)
        if done is not None:
            self._callback = DoneCallback(self.has_ended, done)
            self._callbacks.add(self._callback)

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """What ``stream`` is given from now on waits for this work."""
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
    """What ``stream`` is given from now on waits for all ``completions`` that have not ended.

    For work of a thread it waits for a flag in memory; a thread's work ends in order, so the last flag is enough. CUDA
    does not see that order, and asks that it be expressed in events too where it is between streams (driver API,
    ``cuStreamWaitValue32``): the stream waits for what the thread waits for as well.
    """
    flags: dict[Flag, int] = {}
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
    """Can a stream wait for it in the host's place?"""
    return isinstance(completion, StreamCompletion) or (
        isinstance(completion, ThreadCompletion) and completion.flag is not None and not completion.has_ended()
    )


class StreamLane:
    """A CUDA stream. Work is launched by the thread that submits it, one thread at a time.

    ``home``: a thread whose current stream it is from the first submission on, so that nothing need be set for work of
    that thread: an estimated 8 us each time.
    """

    def __init__(self, name: str, device: torch.device, clock: GpuClock, home: int | None = None) -> None:
        self.stream = new_stream(device)
        self.callbacks = DoneCallbacks()
        self._name, self._device, self._clock, self._home = name, device, clock, home
        self._error: LaneError | None = None

    def submit(self, work: Work, after: Sequence[Completion] = (), done: Work | None = None) -> StreamCompletion:
        """See ``MachineLane.submit``. Blocks until ``after`` is issued, or has ended if a stream cannot wait for it.

        Raises LaneError if that, or launching, fails.
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
            self._error = LaneError(f"the {self._name} lane has stopped: {why}")
            raise self._error from error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def on_stream(stream: torch.cuda.Stream, is_current: bool) -> AbstractContextManager[object]:
    """The block's work goes to ``stream``, which may be the calling thread's current one already."""
    return nullcontext() if is_current else torch.cuda.stream(stream)
