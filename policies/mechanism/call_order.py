"""The order of a session's calls: its states, and what each call makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from policies.mechanism.views import PolicyError

State = Literal["idle", "between", "planned", "foreseen"]  # "between": in a step, between two layers
TRANSITIONS: Mapping[str, tuple[tuple[State, ...], State]] = {  # of each call: the states before it, the state after it
    "begin_step": (("idle",), "between"),
    "plan_layer": (("between",), "planned"),
    "foresee": (("planned",), "foreseen"),  # if the policy looks ahead
    "end_layer": (("planned", "foreseen"), "between"),
    "end_step": (("between",), "idle"),
}


class CallOrder:
    """The state of one session."""

    def __init__(self) -> None:
        self._state: State = "idle"

    def enter(self, call: str) -> None:
        """Change the state as ``TRANSITIONS`` says. Raises PolicyError for a call out of order."""
        before, after = TRANSITIONS[call]
        if self._state not in before:
            raise PolicyError(f"{call} called while the session is {self._state!r}; expected {' or '.join(before)}")
        self._state = after
