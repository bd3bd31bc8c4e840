"""The question of ``trilane pays``: does an idea pay for this model on that machine?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from policies.registry import system
from sim.machine.hardware import load_hardware
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from traces.library import NO_FORECASTS, calibration_of
from traces.synthesis.named import nearest_routing
from trilane.common.hints import between
from trilane.common.schema import check
from trilane.common.units import in_gb
from trilane.engines.memory import check_fits, need_of
from trilane.engines.question import Question
from trilane.engines.routing import synthetic_names
from trilane.study.pays.ideas import RECALL, Candidate, Idea, PaysError, candidate_of, idea_named
from trilane.study.question_scenario import scenario_of
from trilane.study.sweep.axes import PARAMETER, takers, vary

MOST_STEPS, FEWEST_STEPS = 48, 20  # decode steps that are played of an answer: fewer of models with more layers
USUAL_LAYERS = 48
PROMPT_ROWS = 32  # prompt tokens that are routed one by one, of each sequence
DRAWS = 3


@dataclass(frozen=True)
class PaysQuestion:
    """An idea (``pays.ideas``), and the model, the machine and the lengths of ``trilane fit``'s question.

    ``draws``: answers, other parts of the routing, over which a gain is a mean with a spread. ``policy``: one in place
    of the idea's own, on both sides unless it is what the idea brings. ``x`` and ``y``: the machine's values on the two
    axes; None: its own. Raises PaysError for an unknown idea and for a policy that cannot have it, ChoiceError for an
    unknown policy.
    """

    name: str
    fit: Question
    draws: Annotated[int, between(1, 100)] = DRAWS
    policy: str | None = None
    x: Annotated[float, between(0, 1e6)] | None = None
    y: Annotated[float, between(0, 1e6)] | None = None

    def __post_init__(self) -> None:
        check(self, PaysError)
        idea_named(self.name)
        if self.policy is not None:
            self._check_policy(system(self.policy).name)

    def _check_policy(self, policy: str) -> None:
        if self.idea.of_parts:
            raise PaysError(
                f"pays: {self.name} compares two compositions of `mix`, and takes no other policy; `trilane ablate` "
                f"tells what the prefetcher of a policy brings"
            )
        for axis in (self.idea.x.axis, self.idea.y.axis):
            if axis.startswith(PARAMETER) and policy not in takers(axis):
                raise PaysError(
                    f"pays: {self.name} needs a policy with the parameter `{axis.removeprefix(PARAMETER)}`, such as "
                    f"{self.idea.using[-1].policy_name}; {policy} has none"
                )

    @property
    def idea(self) -> Idea:
        return idea_named(self.name)

    @property
    def without(self) -> tuple[Candidate, ...]:
        return self.idea.without if self.idea.is_policy else self._in_place_of(self.idea.without)

    @property
    def using(self) -> tuple[Candidate, ...]:
        return self._in_place_of(self.idea.using)

    @property
    def alternative(self) -> Candidate | None:
        """Another policy with the idea, which is played on the machine itself alone; none if the policy was named."""
        return self.idea.alternative if self.policy is None else None

    def _in_place_of(self, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        return candidates if self.policy is None else (candidate_of(self.policy, self.idea),)

    @property
    def steps(self) -> int:
        layers = self.fit.model_shape.moe_layers
        return max(MOST_STEPS * USUAL_LAYERS**2 // max(layers, USUAL_LAYERS) ** 2, FEWEST_STEPS)

    @property
    def recalls(self) -> tuple[float, ...]:
        """Recall of gates one to three layers ahead, of this model or the nearest that was measured."""
        known = nearest_routing(self.fit.model_shape).forecast_accuracy
        return tuple(known[name] for name in ("gate@1", "gate@2", "gate@3") if name in known)

    def scenario(self) -> Scenario:
        """With the last of the candidates, and the machine's own memory. A named trace leaves its forecasts out where
        their recall is varied. Raises TraceError."""
        trace, calibration = synthetic_names(
            self.fit.model, (self.fit.batch * self.draws, PROMPT_ROWS, self.steps), (), ()
        )
        if self.fit.trace is not None:
            calibration = calibration_of(self.fit.trace) or calibration
            trace = f"{self.fit.trace}{NO_FORECASTS if self.idea.x.axis == RECALL.axis else ''}"
        scenario = scenario_of(self.fit, trace, self.fit.calibration or calibration)
        asked = scenario.with_(
            sampled_steps=self.steps, sampled_prompt_tokens=PROMPT_ROWS, noisy_forecast_recall=self.recalls
        )
        policy, engine = self.using[-1]
        return vary(asked.with_(engine=engine), "policy", policy)


def prepared_with_idea(question: PaysQuestion) -> Prepared:
    """The question, prepared with the idea on the machine as it is.

    Raises FitError for a model that the machine cannot run, PaysError where nothing is offloaded, and what ``prepare``
    raises.
    """
    asked = question.fit
    shape, hardware = asked.model_shape, load_hardware(asked.hardware)
    if hardware.one_memory:
        raise PaysError(f"pays: {hardware.name} has no GPU with memory of its own, so that nothing is offloaded")
    check_fits(shape, hardware, asked)
    if need_of(shape, hardware, asked.batch, asked.tokens).all_on_gpu:
        raise PaysError(
            f"pays: all experts of {shape.name}, {in_gb(shape.routed_bytes)} GB, fit the memory of the GPU, so that "
            f"nothing is offloaded; name a larger model or a smaller GPU"
        )
    return prepare(question.scenario()).checked()
