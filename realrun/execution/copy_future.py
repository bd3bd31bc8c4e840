"""A copy that other threads can wait for before it has begun."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from realrun.errors import LaneError
from realrun.machine.lanes import Completion


class CopyFuture:
    """A requested copy, which goes through three states: requested, issued by the copy thread, known to the session."""

    def __init__(self) -> None:
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._issued, self._known = threading.Lock(), threading.Lock()  # held until then; faster than events
        self._issued.acquire()
        self._known.acquire()

    def issued(self) -> Completion:
        """Block until the copy has begun, and return its completion. Raises LaneError if it never will."""
        with self._issued:
            pass
        if self._completion is None:
            assert self._error is not None
            raise LaneError.of("the copy lane", self._error) from self._error
        return self._completion

    def wait(self) -> None:
        """Block until the copy has ended."""
        self.issued().wait()

    def wait_known(self) -> None:
        """Block until the copy has ended and the session has been notified."""
        self.wait()
        with self._known:
            pass
        if self._error is not None:
            raise LaneError.of("the copy lane", self._error) from self._error

    ready_ns = property(lambda self: self.issued().ready_ns)
    start_ns = property(lambda self: self.issued().start_ns)
    end_ns = property(lambda self: self.issued().end_ns)

    def has_ended(self) -> bool:
        """Whether the copy has ended, or will never begin."""
        return self._error is not None or (self._completion is not None and self._completion.has_ended())

    def begin(self, completion: Completion) -> None:
        """Set the completion of the copy, which is under way."""
        self._completion = completion
        self._issued.release()

    def set_known(self) -> None:
        """Signal that the session has been notified of the end."""
        self._known.release()

    def fail(self, error: BaseException) -> None:
        """Signal that the copy, or the notification of the session, has failed."""
        if self._error is None:
            self._error = error
            self._known.release()
            if self._completion is None:
                self._issued.release()

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """If the block, which delivers the copy, raises, all waiting threads get the error."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
