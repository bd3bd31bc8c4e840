"""The log of a session's calls, and its comparison with the answers of a fresh session (docs/design.md, law 10)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

from policies.mechanism.host_tier import HostTier
from policies.mechanism.routing_error import RoutingErrors
from policies.mechanism.session import Session
from policies.mechanism.views import Copy, ExpertCosts, Plan
from policies.protocols import Budget, Composition
from sim.runs.demand import StepDemand

LOGGED = ("begin_step", "plan_layer", "foresee", "end_layer", "end_step", "next_copy", "copied", "computed",
          "next_read", "has_read", "computed_on_cpu")


class Call(NamedTuple):
    """One call of a session's method: arguments and result."""

    name: str
    given: tuple[Any, ...]
    answer: Any


class LoggedSession(Session):
    """A session that logs the calls of its methods in ``LOGGED``, in their order."""

    def __init__(
        self, policy: Composition, budget: Budget, costs: Sequence[ExpertCosts], host: HostTier | None = None
    ) -> None:
        super().__init__(policy, budget, costs, host)
        self.log: list[Call] = []

    def plans(self) -> dict[tuple[int, int], Plan]:
        """The plan of every step and layer."""
        calls = (call for call in self.log if call.name == "plan_layer")
        return {(call.given[0].step, call.given[0].layer): call.answer for call in calls}

    def copies(self) -> list[Copy]:
        """All copies that were started, in order."""
        return [call.answer for call in self.log if call.name == "next_copy" and call.answer is not None]

    def routing_errors(self, demand: Sequence[StepDemand]) -> RoutingErrors | None:
        """Deviations of the logged run from its routers' choices in ``demand``; None if its policy keeps these."""
        if not self.policy.needs.changes_routing:
            return None
        errors, committed = RoutingErrors(), False
        for call in self.log:
            if call.name == "foresee":
                committed = call.answer[0].commit is not None
            if call.name == "plan_layer":
                [given] = call.given
                step = demand[given.step]
                forecasts = step.forecasts[given.layer - 1] if committed else None
                errors.observe(given.step, given.phase, step.routings[given.layer], call.answer, forecasts)
                committed = False
        return errors


def _logged(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def logged(session: LoggedSession, *given: Any) -> Any:
        answer = method(session, *given)
        session.log.append(Call(method.__name__, given, answer))
        return answer

    return logged


for _name in LOGGED:
    setattr(LoggedSession, _name, _logged(getattr(Session, _name)))


class Difference(NamedTuple):
    """The first call with another answer from a fresh session; ``answer``: the fresh session's, or its exception."""

    place: int
    call: Call
    answer: Any


def replay(log: Sequence[Call], fresh: Session) -> Difference | None:
    """Make the same calls to a fresh session of the same policy; None if all its answers are the same."""
    in_flight: deque[Copy] = deque()
    for place, call in enumerate(log):
        # The session compares copies by identity, so it must get its own.
        given = (in_flight.popleft(),) if call.name == "copied" and in_flight else call.given
        try:
            answer = getattr(fresh, call.name)(*given)
        except Exception as error:  # calls that raise are not in the log, so this is a difference
            return Difference(place, call, error)
        if answer != call.answer:
            return Difference(place, call, answer)
        if call.name == "next_copy" and answer is not None:
            in_flight.append(answer)
    return None
