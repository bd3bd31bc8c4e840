"""Two threads that take turns: a model's forward pass, which cannot be left in the middle, and its host.

One runs while the other waits, so that results do not depend on how threads are scheduled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """``work`` runs in a thread of its own, from the first ``resume`` on, and calls ``pause`` to let the host go on."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._given: SimpleQueue[tuple[bool, T | None]] = SimpleQueue()  # whether to go on, and with what
        self._paused: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def resume(self, value: T | None = None) -> None:
        """Let the work go on with ``value``, until it pauses or ends. Raises what the work raises."""
        self._given.put((True, value))
        error = self._paused.get()
        if error is not None:
            raise error

    def pause(self) -> T | None:
        """Let the host go on, and wait for its next ``resume``; returns its value. Called by the work."""
        self._paused.put(None)
        return self._next()

    def close(self) -> None:
        """End the work where it is."""
        self._given.put((False, None))
        self._thread.join()

    def _next(self) -> T | None:
        goes_on, value = self._given.get()
        if not goes_on:
            raise _EndedError
        return value

    def _run(self) -> None:
        try:
            self._next()
            self._work()
            self._paused.put(None)
        except _EndedError:
            pass
        except BaseException as error:
            self._paused.put(error)


class _EndedError(Exception):
    """Ends the work from inside."""
