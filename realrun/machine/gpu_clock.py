"""The clock of a GPU, converted to the host's time, and the streams and events that it needs."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import torch

TRIES = 5
BASE_LIFE_NS = 100_000_000


class Base(NamedTuple):
    """An event, and the time at which the host observed it."""

    event: torch.cuda.Event
    host_ns: int

    def host_ns_of(self, event: torch.cuda.Event) -> int:
        """When ``event`` happened, which must be in the past."""
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
        return min((self._try() for _ in range(TRIES)), key=lambda found: found[0])[1]

    def _try(self) -> tuple[int, Base]:
        event = new_event()
        before = time.perf_counter_ns()
        event.record(self._stream)
        event.synchronize()
        after = time.perf_counter_ns()
        return after - before, Base(event, after)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that does not wait for the default stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    """An event with a time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
