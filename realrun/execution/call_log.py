"""The log of a session's calls, and what a fresh session answers to the same calls (docs/design.md, law 10)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from policies.mechanism.session import Session
from policies.mechanism.views import Copy, ExpertCosts, ExpertId, Forecast, Foresight, LayerInput, Plan, Updates
from policies.protocols import Budget, Composition

T = TypeVar("T")


class Call(NamedTuple):
    """One call of a session, in the order in which they came."""

    name: str
    given: tuple[Any, ...]
    answer: Any


class LoggedSession(Session):
    """A session that writes down what it was asked and what it answered."""

    def __init__(self, policy: Composition, budget: Budget, costs: Sequence[ExpertCosts]) -> None:
        super().__init__(policy, budget, costs)
        self.log: list[Call] = []

    def begin_step(self, step: int) -> None:
        """See Session."""
        return self._logged(super().begin_step, step)

    def plan_layer(self, given: LayerInput) -> Plan:
        """See Session."""
        return self._logged(super().plan_layer, given)

    def foresee(self, forecasts: Sequence[Forecast]) -> tuple[Foresight, tuple[ExpertId, ...]]:
        """See Session."""
        return self._logged(super().foresee, tuple(forecasts))

    def end_layer(self) -> Updates:
        """See Session."""
        return self._logged(super().end_layer)

    def end_step(self) -> Updates:
        """See Session."""
        return self._logged(super().end_step)

    def next_copy(self, demand: bool = True) -> Copy | None:
        """See Session."""
        return self._logged(super().next_copy, demand)

    def copied(self, copy: Copy) -> bool:
        """See Session."""
        return self._logged(super().copied, copy)

    def computed(self, id: ExpertId) -> None:
        """See Session."""
        return self._logged(super().computed, id)

    def plans(self) -> dict[tuple[int, int], Plan]:
        """The plan of every step and layer."""
        calls = (call for call in self.log if call.name == "plan_layer")
        return {(call.given[0].step, call.given[0].layer): call.answer for call in calls}

    def copies(self) -> list[Copy]:
        """Every copy that was started, in order."""
        return [call.answer for call in self.log if call.name == "next_copy" and call.answer is not None]

    def _logged(self, call: Callable[..., T], *given: Any) -> T:
        answer = call(*given)
        self.log.append(Call(call.__name__, given, answer))
        return answer


class Difference(NamedTuple):
    """The first call that a fresh session answered otherwise; ``answer``: its own, or what it raised."""

    place: int
    call: Call
    answer: Any


def replay(log: Sequence[Call], fresh: Session) -> Difference | None:
    """Ask a fresh session of the same policy the same questions; None if all its answers are the same."""
    in_flight: deque[Copy] = deque()
    for place, call in enumerate(log):
        # The session knows its own copy, not an equal one.
        given = (in_flight.popleft(),) if call.name == "copied" and in_flight else call.given
        try:
            answer = getattr(fresh, call.name)(*given)
        except Exception as error:  # which the run's own session did not raise, or the call would not be in the log
            return Difference(place, call, error)
        if answer != call.answer:
            return Difference(place, call, answer)
        if call.name == "next_copy" and answer is not None:
            in_flight.append(answer)
    return None
