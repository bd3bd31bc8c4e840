"""``trilane fit``: what will this model do on that machine?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sim.machine.hardware import load_hardware
from traces.models.catalogue import trained_tokens
from trilane.engines.memory import check_fits, longest_prompt, surely_runs
from trilane.engines.question import Question
from trilane.fit.workers import workers

if TYPE_CHECKING:
    from trilane.fit.answer import Fit

LONGEST = 2**20  # tokens; no prompt of more is looked for where it is not known what a model was trained for


def fit(question: Question, jobs: int = 1) -> Fit:
    """Answer a question. ``jobs``: processes that share the work; see ``trilane.study.pool.WorkerPool``.

    Raises FitError for what cannot run, saying by how many GB, and what ``policy_answer`` raises.
    """
    shape, hardware = question.model_shape, load_hardware(question.hardware)
    check_fits(shape, hardware, question)
    with workers(question, shape, hardware, jobs) as pool:
        from trilane.fit.answer import answered  # here: the other processes import it meanwhile

        return answered(question, shape, hardware, jobs, pool)


def with_longest_prompt(question: Question) -> Question:
    """Return the question with the longest prompt that fits, and that the model was trained for, in whole 256 tokens.

    Raises FitError if none does.
    """
    from trilane.engines.question import engine_of
    from trilane.engines.speed import EngineSpeed

    shape, hardware = question.model_shape, load_hardware(question.hardware)

    def runs(tokens: int) -> bool:
        longer = replace(question, prompt_tokens=tokens)
        if not surely_runs(shape, hardware, longer):
            return False
        return hardware.measured or EngineSpeed(longer, shape, hardware, engine_of(longer, hardware)).has_room

    trained = trained_tokens(shape.name) or LONGEST + question.generated
    return replace(question, prompt_tokens=longest_prompt(runs, max(trained - question.generated, 1) + 1) or 1)
