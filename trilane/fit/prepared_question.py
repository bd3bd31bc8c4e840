"""Prepared questions: the scenario of a question, resolved, on its own machine or on another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.costs.cost_table import CostTable, StepCosts, StepModel
from sim.costs.engine import load_engine
from sim.machine.hardware import Hardware
from sim.machine.plan_costs import PlanCosts
from sim.runs.prepare import Prepared, prepare
from trilane.engines.memory import need_of
from trilane.engines.question import Question
from trilane.engines.routing import RoutingSource, routing_for
from trilane.fit.candidates import forecasts_read
from trilane.study.question_scenario import scenario_of


def prepared_for(question: Question) -> Prepared:
    """A question, prepared for any policy. Raises TraceError, and what ``prepare`` raises."""
    routing = routing_of(question, with_calibration=True)
    prepared = prepare(scenario_of(question, routing.name, routing.calibration), routing.trace)
    return on_machine(replace(prepared, shape=question.with_cache(prepared.shape)), prepared.hardware)


def routing_of(question: Question, *, with_calibration: bool = False) -> RoutingSource:
    """Return the routing of a question, with the forecasts that its candidates read. Raises what ``routing_for`` and
    ``forecasts_read`` raise."""
    return routing_for(question, forecasts_read(question), with_calibration=with_calibration)


def on_machine(prepared: Prepared, hardware: Hardware) -> Prepared:
    """Return the same question on another machine.

    Where every expert is on the GPU and its kernels are recorded, no routing comes to the host, which neither waits nor
    decides.
    """
    moved = prepared.on(hardware)
    recorded = load_engine(moved.scenario.engine).starts == "graphs"
    return moved.with_costs(undecided(moved.costs)) if recorded and all_on_gpu(moved) else moved


def all_on_gpu(prepared: Prepared) -> bool:
    """True if there is room for every expert."""
    tokens = prepared.tokens_per_sequence
    return need_of(prepared.shape, prepared.hardware, prepared.scenario.batch, tokens).all_on_gpu


@dataclass(frozen=True)
class _Undecided:
    """Steps whose routing stays on the GPU."""

    steps: StepModel

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        return self.steps.step(tokens, context)._replace(routing_ns=0)


def undecided(costs: CostTable) -> CostTable:
    """The costs without routing to the host, synchronisation and decisions."""
    return replace(costs, steps=_Undecided(costs.steps), sync_ns=0, plan_costs=PlanCosts())
