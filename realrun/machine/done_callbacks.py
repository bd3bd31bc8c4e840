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
