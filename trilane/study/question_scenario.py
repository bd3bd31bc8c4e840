"""The question of ``trilane fit`` as a scenario, in which its policies are played."""

from __future__ import annotations

from sim.costs.engine import PLAIN
from sim.runs.scenario import Scenario
from trilane.common.units import GB
from trilane.engines.memory import expert_room
from trilane.engines.question import PROMPT_ROWS, Question


def scenario_of(question: Question, trace: str, calibration: str | None) -> Scenario:
    """Return the scenario of a policy that is still to be chosen. The host's memory has the room for experts that an
    engine leaves there."""
    room = expert_room(question.model_shape, question.load_machine(), question)
    return Scenario(
        trace=trace, model=question.shape, hardware=question.hardware, batch=question.batch, calibration=calibration,
        prompt_tokens=question.prompt_tokens, generated_tokens=question.generated,
        engine=PLAIN if question.on_profile else question.policy_engine,
        disk=None if room is None else question.disk, host_expert_gb=None if room is None else room / GB,
        sampled_steps=question.most_steps, sampled_prompt_tokens=max(PROMPT_ROWS // question.batch, 1),
    )
