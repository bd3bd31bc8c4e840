"""A copy to come, as other threads wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from realrun.errors import LaneError
from realrun.machine.lanes import Completion


class CopyFuture:
    """A copy to come, for those who wait: issued by the copy thread, then under way, then known to the session."""

    def __init__(self) -> None:
        self._mark: Completion | None = None
        self._error: BaseException | None = None
        self._issued, self._known = threading.Lock(), threading.Lock()  # held until then: quicker than events
        self._issued.acquire()
        self._known.acquire()

    def issued(self) -> Completion:
        """Block until the copy has begun; its completion. Raises LaneError if it never will."""
        with self._issued:
            pass
        if self._mark is None:
            assert self._error is not None
            raise LaneError.of("the copy lane", self._error) from self._error
        return self._mark

    def wait(self) -> None:
        """Block until the copy has ended."""
        self.issued().wait()

    def wait_known(self) -> None:
        """Block until the session has been told too."""
        self.wait()
        with self._known:
            pass
        if self._error is not None:
            raise LaneError.of("the copy lane", self._error) from self._error

    ready_ns = property(lambda self: self.issued().ready_ns)
    start_ns = property(lambda self: self.issued().start_ns)
    end_ns = property(lambda self: self.issued().end_ns)

    def has_ended(self) -> bool:
        """See ``Completion``: is the copy over, or will it never come?"""
        return self._error is not None or (self._mark is not None and self._mark.has_ended())

    def begin(self, completion: Completion) -> None:
        """The copy is under way."""
        self._mark = completion
        self._issued.release()

    def set_known(self) -> None:
        """The session knows that it has arrived."""
        self._known.release()

    def fail(self, error: BaseException) -> None:
        """It will never come, or will never be known."""
        if self._error is None:
            self._error = error
            self._known.release()
            if self._mark is None:
                self._issued.release()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Threads that wait for it are told if the block fails."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
