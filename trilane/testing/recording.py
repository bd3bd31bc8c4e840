"""A session that remembers what was decided, and a run as the laws look at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from policies.mechanism.session import Session
from policies.mechanism.views import Copy, Forecast, Foresight, LayerInput, Plan, Swap, Updates, Upload
from policies.protocols import When
from sim.costs.cost_table import CostTable
from sim.runs.demand import StepDemand
from trilane.testing.log import Log, Routings, log_of


class RecordingSession(Session):
    """A session that remembers what was decided."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.plans: dict[tuple[int, int], Plan] = {}
        self.foresights: dict[tuple[int, int], Foresight] = {}
        self.swaps_asked: list[tuple[tuple[int, int], When, Sequence[Swap | Upload]]] = []
        self.refused: set[int] = set()  # when the free lane has looked for work and found none
        self.clock: Callable[[], float] = lambda: 0

    def plan_layer(self, given: LayerInput) -> Plan:
        self._place = (given.step, given.layer)
        plan = self.plans[self._place] = super().plan_layer(given)
        self.swaps_asked.append((self._place, "routed", plan.swaps))
        return plan

    def foresee(self, forecasts: Sequence[Forecast]) -> Any:
        answer = super().foresee(forecasts)
        self.foresights[self._place] = answer[0]
        return answer

    def end_layer(self) -> Updates:
        updates = super().end_layer()
        self.swaps_asked.append((self._place, "layer_end", updates.queued))
        return updates

    def end_step(self) -> Updates:
        updates = super().end_step()
        self.swaps_asked.append(((self._place[0], -1), "step_end", updates.queued))
        return updates

    def next_copy(self, demand: bool = True) -> Copy | None:
        copy = super().next_copy(demand)
        if copy is None:
            self.refused.add(int(self.clock()))
        return copy


@dataclass(frozen=True)
class PlayedWorld:
    """A world that has run."""

    spans: pd.DataFrame
    session: RecordingSession
    demand: list[StepDemand]
    budget_bytes: int  # all GPU memory that experts may hold
    costs: CostTable

    @cached_property
    def log(self) -> Log:
        """The spans, indexed."""
        return log_of(self.spans)

    @property
    def routings(self) -> Routings:
        """The routing in force."""
        return {place: plan.routing.workload() for place, plan in self.session.plans.items()}

    @property
    def demand_slots(self) -> int:
        return self.session.policy.demand_slots
