"""Callbacks for the end of GPU work, called in order by the next thread that polls.

A GPU calls no Python, and a thread that waits for every end would have to wake up and take the interpreter lock while
the layer waits. The host thread and the copy thread poll anyway: after a wait, and before a copy is chosen.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from realrun.errors import LaneError
from realrun.machine.lanes import Work


class DoneCallback:
    """One callback; ``has_ended`` is about its work. ``error``: what stopped this callback or an earlier one."""

    def __init__(self, has_ended: Callable[[], bool], done: Work) -> None:
        self.has_ended, self._done = has_ended, done
        self.error: BaseException | None = None

    def call(self, broken: BaseException | None) -> BaseException | None:
        """Call it, unless an earlier one is ``broken``; returns the error, if there is any."""
        self.error = broken
        if broken is None:
            try:
                self._done()
            except BaseException as error:
                self.error = error
        return self.error


class DoneCallbacks:
    """The callbacks of one lane, in the order of its work."""

    def __init__(self) -> None:
        self._pending: deque[DoneCallback] = deque()
        self._lock = threading.Lock()  # held by the thread that calls
        self._broken: BaseException | None = None

    def add(self, callback: DoneCallback) -> None:
        """Append a callback, whose work is later than that of all others."""
        self._pending.append(callback)

    def run(self, *, wait: bool) -> bool:
        """Call those whose work has ended; returns whether any are left.

        If another thread is at it, ``wait`` for that thread, or return at once.
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
