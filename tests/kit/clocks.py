"""Calls at moments of a simulated clock."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from sim.timeline.clock import Clock, Moment


def call_at(clock: Clock, when_ns: int, call: Callable[[], object]) -> None:
    """Call at a moment."""
    def later(_: simpy.Event) -> None:
        call()

    Moment(clock, when_ns, None, later)
