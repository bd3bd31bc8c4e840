"""CUDA streams: lanes that launch work on them, completions timed on the host's clock, callbacks, and recorded graphs.

A GPU calls no Python, and a thread that waits for every end would have to wake up and take the interpreter lock while
the layer waits. The host thread and the copy thread poll anyway, after a wait and before a copy is chosen: the next of
them calls what is due.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

from realrun.errors import LaneError, LaneInputError, RefusedError
from realrun.machine.cuda_memory import StreamFlag, memory_in_words
from realrun.machine.lanes import Completion, OnItsLane, Work
from realrun.machine.thread_lane import ThreadCompletion
from trilane.common.errors import TrilaneError

TRIES = 5
BASE_LIFE_NS = 100_000_000


class Base(NamedTuple):
    """An event, and the time at which the host observed it."""

    event: torch.cuda.Event
    host_ns: int

    def host_ns_of(self, event: torch.cuda.Event) -> int:
        """Time of ``event``, which must be in the past, ns on the host's clock."""
        return self.host_ns + round(float(self.event.elapsed_time(event)) * 1e6)


class GpuClock:
    """Converts GPU time to host time, relative to a base event on a stream of its own, renewed ten times a second.

    CUDA gives the time between two events as a float32 of milliseconds, by a clock that drifts from the host's. 0.1 s
    after the base that rounds to about 10 ns, and a drift of 50 ppm adds 5 us; after 1000 s it would be 60 us and
    50 ms. (CUDA itself promises 0.5 us.) A base is the quickest of several tries. Its time is that of the host when
    ``synchronize`` returned, so all GPU times are late by the least delay with which the host observes an event:
    nothing seems to start before its launch, or to end after the host has observed its end.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)
        self._home = threading.get_ident()
        self.base = self._take()

    def refresh(self) -> None:
        """Take a new base if the present one is old, in the thread that made the clock; other threads do nothing.

        A stream may be waiting for the flag of a thread's work, and what that thread launches could be queued behind
        that stream, since streams share the GPU's hardware queues.
        """
        if threading.get_ident() == self._home and time.perf_counter_ns() - self.base.host_ns > BASE_LIFE_NS:
            self.rebase()

    def rebase(self) -> None:
        """Take a new base. Work that was launched earlier keeps its base."""
        self.base = self._take()

    def _take(self) -> Base:
        return min((self._try() for _ in range(TRIES)), key=lambda tried: tried[0])[1]

    def _try(self) -> tuple[int, Base]:
        event = new_event()
        before_ns = time.perf_counter_ns()
        event.record(self._stream)
        event.synchronize()
        after_ns = time.perf_counter_ns()
        return after_ns - before_ns, Base(event, after_ns)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that does not wait for the default stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    """An event with a time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DoneCallbacks:
    """The callbacks of one lane, in the order of its work; none is called after one that failed."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Callable[[], bool], Work]] = deque()
        self._lock = threading.Lock()  # held by the thread that calls
        self._added, self._called = 0, 0
        self._broken: BaseException | None = None

    def add(self, has_ended: Callable[[], bool], done: Work) -> int:
        """Append the callback of work that is later than that of all others; returns its number."""
        self._pending.append((has_ended, done))
        self._added += 1
        return self._added

    def run(self, *, wait: bool) -> bool:
        """Call those whose work has ended; returns whether any are left.

        If another thread is at it, ``wait`` for that thread, or return at once.
        """
        if self._pending and self._lock.acquire(blocking=wait):
            try:
                while self._pending and self._pending[0][0]():
                    self._call(self._pending[0][1])
                    self._pending.popleft()
            finally:
                self._lock.release()
        return bool(self._pending)

    def raise_error(self, number: int | None = None) -> None:
        """Raises LaneError if the callback of this number, or an earlier one, has failed; None: if any has."""
        if self._broken is not None and (number is None or number > self._called):
            raise LaneError.of("a lane", self._broken) from self._broken

    def _call(self, done: Work) -> None:
        if self._broken is None:
            try:
                done()
                self._called += 1
            except BaseException as error:
                self._broken = error


class WorkTimes(NamedTuple):
    """Times at which work was ready to start, started and ended, ns on the host's clock."""

    ready_ns: int
    start_ns: int
    end_ns: int


class StreamCompletion(OnItsLane):
    """Work between two events of a stream.

    It starts when the stream reaches it: if the stream is idle, launching is part of the time. Waiting spins without
    the interpreter lock.
    """

    def __init__(
        self, clock: GpuClock, submitted_ns: int, after: Sequence[Completion], callbacks: DoneCallbacks
    ) -> None:
        self._clock, self._base, self._submitted_ns, self._after = clock, clock.base, submitted_ns, after
        self._callbacks = callbacks
        self._callback: int | None = None  # its number
        self.blocked_ns = time.perf_counter_ns() - submitted_ns
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
        start_ns, end_ns = map(self._base.host_ns_of, self._events)
        ready_ns = max((self._submitted_ns, *(completion.end_ns for completion in self._after)))
        return WorkTimes(min(ready_ns, start_ns), start_ns, end_ns)


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
    of_streams = [completion for completion in (*completions, *earlier) if isinstance(completion, StreamCompletion)]
    for awaited in dict.fromkeys(of_streams):
        awaited.hold_up(stream)
    for flag, number in flags.items():
        flag.hold_up(stream, number)


def _can_hold_up(completion: Completion) -> bool:
    """True if a stream can wait for it in place of the host."""
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
        submitted_ns = time.perf_counter_ns()
        issued = [completion.issued() for completion in after]
        for earlier in issued:
            if not _can_hold_up(earlier):
                earlier.wait()
        completion = StreamCompletion(self._clock, submitted_ns, issued, self.callbacks)
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
            with torch.inference_mode(), on_stream(self.stream, self._is_current()):
                completion.launch(self.stream, work, done)
        except Exception as error:
            full = isinstance(error, torch.OutOfMemoryError)
            why = f"out of GPU memory: {memory_in_words(self._device)}" if full else str(error)
            kind = LaneInputError if full or isinstance(error, TrilaneError) else LaneError
            self._error = kind(f"the {self._name} lane has stopped: {why}")
            raise self._error from error

    def _is_current(self) -> bool:
        """True where the calling thread launches on this stream already: if its current device is the stream's."""
        return threading.get_ident() == self._home and torch.cuda.current_device() == self._device.index

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def on_stream(stream: torch.cuda.Stream, is_current: bool) -> AbstractContextManager[object]:
    """Make ``stream`` the current one in the block; nothing is set if it is already."""
    return nullcontext() if is_current else torch.cuda.stream(stream)


T = TypeVar("T")


class CudaGraphs:
    """Records graphs on the current stream. ``recorded``: their number.

    Graphs of one kind share memory, which torch allows if they never run at the same time and do not read each other's
    output (https://github.com/pytorch/pytorch/pull/166975). So a graph reads memory that was allocated outside, and its
    output must be read before another graph of its kind is replayed.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self._pools: dict[str, Any] = {}

    def record(self, kind: str, work: Callable[[], T]) -> Callable[[], T]:
        """Run ``work`` once, since libraries allocate and initialise on first use, and then record it.

        What is returned launches the graph on the current stream, which writes the output of ``work`` (tensors, or
        tuples of them) again at the same place, and returns it.

        ``work`` must neither wait for the device nor read host memory. Other threads use other streams at the same
        time and poll their events, at which a recording in CUDA's "global" mode would fail
        (https://github.com/pytorch/pytorch/pull/104555). Raises RefusedError if CUDA cannot record it.
        """
        work()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        pool = self._pools.setdefault(kind, torch.cuda.graph_pool_handle())
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                output = work()
        except RuntimeError as error:
            raise RefusedError(f"cuda: could not record {kind} as a graph: {error}; use runtime=eager") from error
        self.recorded += 1

        def replay() -> T:
            graph.replay()
            return output

        return replay
