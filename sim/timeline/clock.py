"""The clock of a run: SimPy's, in whole ns, which goes straight on where nothing else can happen."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import simpy
from simpy.events import NORMAL

Callback = Callable[[simpy.Event], None]


class Moment(simpy.Event):
    """An event at ``at_ns``, no earlier than now: a ``Timeout`` that takes a third of the time to make."""

    _ok = True

    def __init__(self, clock: Clock, at_ns: int, value: object = None, callback: Callback | None = None) -> None:
        self.callbacks = [] if callback is None else [callback]
        self._value = value
        heappush(clock._queue, (at_ns, NORMAL, next(clock._eid), self))


class Clock(simpy.Environment):
    """Time in ns; events of one moment happen in the order in which they were made."""

    now: int = 0  # in ns; an attribute, as it is read a dozen times a layer

    def advance_to(self, at_ns: int) -> bool:
        """Go on to ``at_ns`` if no event is due by then; else return False, and the caller has to wait for a Moment.

        A process that waits would be the next to go on in any case: most layers have nothing that runs next to them.
        """
        if self._queue and self._queue[0][0] <= at_ns:
            return False
        self._now = self.now = at_ns
        return True

    def play(self) -> None:
        """``run()``, in a third of its time: until there are no more events. Raises what a process has raised."""
        queue = self._queue
        while queue:
            at_ns, _, _, event = heappop(queue)
            self._now = self.now = at_ns  # type: ignore[assignment]  # only whole ns are put in
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as ``step`` does
            for callback in callbacks:
                callback(event)
            if not event._ok:
                raise event._value
