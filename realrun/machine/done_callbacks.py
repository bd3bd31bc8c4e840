"""Callbacks of GPU work that are called, in order, by whichever thread looks next once the work has ended.

A GPU calls no Python. A thread that waits for each end would be woken by an interrupt and then need the interpreter
lock, on the way of the layer; the host and the copy thread look anyway, one when it has waited, the other before it
asks for a copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from realrun.errors import LaneError
from realrun.machine.lanes import Work


class DoneCallback:
    """One callback; ``has_ended`` says whether its work has. ``error``: what stopped the callback, or one before it."""

    def __init__(self, has_ended: Callable[[], bool], done: Work) -> None:
        self.has_ended, self._done = has_ended, done
        self.error: BaseException | None = None

    def call(self, broken: BaseException | None) -> BaseException | None:
        """Call it, unless one before it has failed; returns what failed, if anything has."""
        self.error = broken
        if broken is None:
            try:
                self._done()
            except BaseException as error:
                self.error = error
        return self.error


class DoneCallbacks:
    """Of one lane, in the order of its work."""

    def __init__(self) -> None:
        self._pending: deque[DoneCallback] = deque()
        self._lock = threading.Lock()  # held by the thread that calls
        self._broken: BaseException | None = None

    def add(self, callback: DoneCallback) -> None:
        """Its work comes after that of all before it."""
        self._pending.append(callback)

    def run(self, *, wait: bool) -> bool:
        """Call those whose work has ended; are any left?

        If another thread is calling them, ``wait`` for it to end, or return at once.
        """
        if self._pending and self._lock.acquire(blocking=wait):
            try:
                while self._pending and self._pending[0].has_ended():
                    self._broken = self._pending[0].call(self._broken)
                    self._pending.popleft()
            finally:
                self._lock.release()
        return bool(self._pending)

    def raise_error(self) -> None:
        """Raises LaneError if a callback has failed."""
        if self._broken is not None:
            raise LaneError.of("a lane", self._broken) from self._broken
