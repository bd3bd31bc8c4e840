"""The clock of a GPU, told in the host's time; and the streams and events that it is told by."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import torch

TRIES = 5
BASE_LIFE_NS = 100_000_000


class Base(NamedTuple):
    """An event, and the host's time at which the host learned of it."""

    event: torch.cuda.Event
    host_ns: int

    def host_ns_of(self, event: torch.cuda.Event) -> int:
        """When ``event``, which has ended, ended."""
        return self.host_ns + round(float(self.event.elapsed_time(event)) * 1e6)


class GpuClock:
    """Translates GPU time to host time, by a base on a stream of its own that is taken anew ten times a second.

    CUDA tells how long after another event an event came, as a float32 of milliseconds and by a clock that drifts from
    the host's. 0.1 s behind its base that rounds to about 10 ns, and a drift of 50 ppm makes 5 us; after 1000 s, 60 us
    and 50 ms. (CUDA itself promises 0.5 us.) A base is the quickest of several tries. Its time is the host's when
    ``synchronize`` returned, so that all GPU times are late by the least delay with which the host can learn of an
    event: nothing seems to start before it was launched, or to end after the host knew.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)
        self._home = threading.get_ident()
        self.base = self._take()

    def refresh(self) -> None:
        """Take a new base if the present one is old.

        The thread that made the clock does, no other: a stream may be waiting for the flag of a thread's work, and what
        that thread then gave to a stream could be queued behind it (streams share the GPU's hardware queues).
        """
        if threading.get_ident() == self._home and time.perf_counter_ns() - self.base.host_ns > BASE_LIFE_NS:
            self.rebase()

    def rebase(self) -> None:
        """Take a new base. Work that was launched before keeps the base it had."""
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
    """An event that has a time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
