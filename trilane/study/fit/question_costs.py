"""What everything costs in a question: in its runtime, without decisions where there is nothing to decide, and with a
quicker host program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.costs.cost_table import CostTable, StepCosts, StepModel
from sim.costs.runtimes import costs_on
from sim.machine.hardware import Hardware
from sim.machine.plan_costs import PlanCosts
from traces.models.shape import ModelShape
from trilane.study.fit.memory_needed import all_on_gpu
from trilane.study.fit.question import Question


def costs_of(question: Question, shape: ModelShape, hardware: Hardware, max_tokens: int) -> CostTable:
    """The cost table of a question's model on a machine; a measured profile is left as it was measured.

    Raises what ``costs_on`` raises.
    """
    runtime = "eager" if hardware.measured else question.runtime
    costs = costs_on(hardware, shape, max_tokens, runtime, question.batch)
    return undecided(costs) if runtime == "graphs" and all_on_gpu(shape, hardware, question) else costs


def quicker(costs: CostTable, names: Sequence[str], factor: float) -> CostTable:
    """The costs with some of the host program's times (``LAUNCHES``, ``lead_ns``, ``sync_ns``, ``plan_factor``) times
    ``factor``."""
    times = {name: getattr(costs, name) for name in names}
    scaled: dict[str, Any] = {name: time * factor for name, time in times.items() if time is not None}
    return replace(costs, **{name: time if name == "plan_factor" else round(time) for name, time in scaled.items()})


@dataclass(frozen=True)
class _Undecided:
    """Steps whose routing stays on the GPU."""

    steps: StepModel

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        return self.steps.step(tokens, context)._replace(routing_ns=0)


def undecided(costs: CostTable) -> CostTable:
    """The costs where every expert is on the GPU: no routing comes to the host, nobody waits for it or decides."""
    return replace(costs, steps=_Undecided(costs.steps), sync_ns=0, plan_costs=PlanCosts())
