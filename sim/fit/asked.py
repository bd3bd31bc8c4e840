"""A question with its names resolved: model, machine, routing, and the steps that every policy plays."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.protocols import Composition
from sim.costs.cost_table import CostTable
from sim.fit.fits import all_on_gpu
from sim.fit.long_prompt import lengths_of, repeated, spread
from sim.fit.question import Question
from sim.fit.routing import Routing
from sim.fit.runtime import costs_with, quicker_host, undecided
from sim.machine.hardware import Hardware
from sim.scenario import Scenario
from sim.simulate import Prepared, Setting, compose_policy, prepare, setting_of
from traces.model_shape import ModelShape


@dataclass(frozen=True)
class Asked:
    """What a question comes to. ``setting`` holds the prompt before it is repeated, and the costs of all of it."""

    question: Question
    setting: Setting
    times: int  # how often the prompt is repeated

    def ready(self, policy: str) -> Prepared:
        """A policy about to run. What follows the routing token by token plays the short prompt: its TTFT is none."""
        prepared = prepare(self.setting, compose_policy(self.setting, policy, {}))
        if token_by_token(prepared.composition):
            return prepared
        return prepared._replace(demand=[repeated(step, self.times) for step in prepared.demand])

    def on(self, hardware: Hardware, host: float = 1.0) -> Asked:
        """The same question on another machine, whose host program takes ``host`` times as long."""
        costs = _costs(self.question, self.setting.shape, hardware, self.setting.costs.max_tokens)
        return replace(self, setting=replace(self.setting, hardware=hardware)).with_costs(quicker_host(costs, host))

    def with_costs(self, costs: CostTable) -> Asked:
        """The same question at other costs."""
        return replace(self, setting=replace(self.setting, costs=costs))


def token_by_token(composition: Composition) -> bool:
    """Does the policy look at every token of a prompt, so that it cannot be played on a repeated one?"""
    return composition.needs.tokens


def resolved(question: Question, routing: Routing) -> Asked:
    """Raises what ``setting_of`` raises."""
    prompt, times, steps = lengths_of(routing.trace, question)
    scenario = Scenario(
        trace=routing.name, model=question.shape, hardware=question.hardware, batch=question.batch,
        calibration=routing.calibration, prompt_tokens=prompt, generated_tokens=steps,
    )  # fmt: skip
    setting = setting_of(scenario, routing.trace)
    costs = _costs(question, setting.shape, setting.hardware, prompt * times * question.batch)
    return Asked(question, replace(setting, steps=spread(setting.steps, question), costs=costs), times)


def _costs(question: Question, shape: ModelShape, hardware: Hardware, max_tokens: int) -> CostTable:
    """Costs in the question's runtime, without decisions where there is nothing to decide."""
    sharing = min(shape.top_k * question.batch, shape.experts)
    costs = costs_with(question.runtime, hardware, shape, max_tokens, sharing)
    decided = question.runtime == "graphs" and hardware.profile is None and all_on_gpu(shape, hardware, question)
    return undecided(costs) if decided else costs
