"""A question with its names resolved: model, machine, routing, and the steps that every policy plays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from policies.protocols import Composition
from sim.costs.cost_table import CostTable
from sim.machine.hardware import Hardware
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from trilane.study.fit.answer_steps import spread
from trilane.study.fit.long_prompt import lengths_of, repeated
from trilane.study.fit.question import Question
from trilane.study.fit.question_costs import costs_of
from trilane.study.fit.routing import Routing, routing_for


@dataclass(frozen=True)
class Asked:
    """What a question comes to. ``setting`` holds the prompt before it is repeated, and the costs of all of it."""

    question: Question
    setting: Prepared
    times: int  # how often the prompt is repeated
    routing: str  # where it is from, as it is told

    def ready(self, policy: str) -> Prepared:
        """A policy about to run. What follows the routing token by token plays the short prompt: its TTFT is none."""
        return self.repeated(self.setting.with_policy(policy).checked())

    def repeated(self, prepared: Prepared) -> Prepared:
        """See ``ready``."""
        if token_by_token(prepared.composition):
            return prepared
        return prepared.over([repeated(step, self.times) for step in prepared.demand])

    def on(self, hardware: Hardware) -> Asked:
        """The same question on another machine."""
        costs = costs_of(self.question, self.setting.shape, hardware, self.setting.costs.max_tokens)
        return replace(self, setting=replace(self.setting, hardware=hardware)).with_costs(costs)

    @property
    def steps(self) -> int:
        """Decode steps that are played."""
        return sum(step.phase == "decode" for step in self.setting.steps)

    def with_costs(self, costs: CostTable) -> Asked:
        """The same question at other costs."""
        return replace(self, setting=self.setting.with_costs(costs))


def token_by_token(composition: Composition) -> bool:
    """Does the policy look at every token of a prompt, so that it cannot be played on a repeated one?"""
    return composition.needs.tokens


@lru_cache(maxsize=1)
def asked_of(question: Question) -> Asked:
    """A question resolved, once in every process that works on it. Raises what ``resolved`` and ``routing_for`` do."""
    return resolved(question, routing_for(question))


def resolved(question: Question, routing: Routing) -> Asked:
    """Raises what ``prepare`` raises."""
    prompt, times, steps = lengths_of(routing.trace, question)
    scenario = Scenario(
        trace=routing.name, model=question.shape, hardware=question.hardware, batch=question.batch,
        calibration=routing.calibration, prompt_tokens=prompt, generated_tokens=steps,
    )  # fmt: skip
    setting = prepare(scenario, routing.trace)
    costs = costs_of(question, setting.shape, setting.hardware, prompt * times * question.batch)
    return Asked(question, replace(setting, steps=spread(setting.steps, question), costs=costs), times, routing.told)
