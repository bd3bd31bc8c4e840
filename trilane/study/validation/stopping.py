"""Reasons to stop a validation before its next run: a time limit, or a signal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A check that is made before every run. ``limit_s``: seconds from now; None: no limit."""

    def __init__(self, limit_s: float | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._now_s, self._began_s = limit_s, now_s, now_s()
        self.signal: signal.Signals | None = None

    def why(self) -> str | None:
        """The reason to stop, if there is one."""
        if self.signal is not None:
            return f"{self.signal.name} was received"
        if self._limit_s is not None and self._now_s() - self._began_s >= self._limit_s:
            return f"the time limit of {self._limit_s:g} s is used up"
        return None


@contextmanager
def stopping(limit_s: float | None = None) -> Iterator[Stop]:
    """A Stop that records the first SIGINT or SIGTERM; a second one ends the process as usual.

    Outside the main thread, where Python cannot handle signals, only the time limit applies.
    """
    stop = Stop(limit_s)
    before: dict[signal.Signals, signal._HANDLER] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def handle(number: int, _frame: FrameType | None) -> None:
        stop.signal = signal.Signals(number)
        restore()

    if threading.current_thread() is threading.main_thread():
        before |= {each: signal.signal(each, handle) or signal.SIG_DFL for each in SIGNALS}
    try:
        yield stop
    finally:
        restore()
