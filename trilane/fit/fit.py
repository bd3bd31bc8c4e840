"""``trilane fit``: what will this model do on that machine?

The processes that answer a question are begun at once: they import what they need while this one prepares it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sim.machine.hardware import Hardware
from traces.models.catalogue import trained_tokens
from traces.models.shape import ModelShape
from trilane.engines.memory import longest_prompt, need_of, surely_runs
from trilane.engines.question import Question
from trilane.engines.refusals import check_fits
from trilane.engines.shortage import NoRoomError
from trilane.study.pool import WorkerPool

if TYPE_CHECKING:
    from sim.runs.prepare import Prepared
    from trilane.fit.answer import Fit


_USUAL_PLAYS = 6  # of the candidates
_ADDED = 2  # llama.cpp and the clairvoyant run
_IMPORTS = ("trilane.fit.prepared_question", "trilane.fit.sensitivity")
LONGEST = 2**20  # tokens; no prompt of more is looked for where it is not known what a model was trained for


def workers(question: Question, shape: ModelShape, hardware: Hardware, jobs: int) -> WorkerPool[Prepared]:
    """At most ``jobs`` processes, one of which is this one; no more than there are candidates to play at a time."""
    plays = _USUAL_PLAYS if question.policies is None else len(question.policies) + _ADDED
    if hardware.cpu_only or need_of(shape, hardware, question.batch, question.tokens).all_on_gpu:
        plays = 1
    processes = min(jobs, plays)
    return WorkerPool(processes, partial(_prepared, question, processes), copied=True, imports=_IMPORTS)


def _prepared(question: Question, processes: int) -> Prepared:
    from trilane.fit.prepared_question import prepared_for  # it takes long to import

    prepared = prepared_for(question)
    return prepared if processes == 1 else prepared.calibrated()


def fit(question: Question, jobs: int = 1) -> Fit:
    """Answer a question. ``jobs``: processes that share the work; see ``trilane.study.pool.WorkerPool``.

    Raises FitError for what cannot run, saying by how many GB, and what ``policy_answer`` raises.
    """
    shape, hardware = question.model_shape, question.load_machine()
    if not hardware.cpu_only:
        try:
            check_fits(shape, hardware, question)
        except NoRoomError as error:
            from trilane.fit.answer import engine_alone

            return engine_alone(question, shape, hardware, error)
    with workers(question, shape, hardware, jobs) as pool:
        from trilane.fit.answer import answered  # here: the other processes import it meanwhile

        return answered(question, shape, hardware, jobs, pool)


def with_longest_prompt(question: Question) -> Question:
    """Return the question with the longest prompt that fits, and that the model was trained for, in whole 256 tokens.

    Raises FitError if none does.
    """
    from trilane.engines.question import engine_of
    from trilane.engines.speed import EngineSpeed

    shape, hardware = question.model_shape, question.load_machine()

    def runs(tokens: int) -> bool:
        longer = replace(question, prompt_tokens=tokens)
        if not surely_runs(shape, hardware, longer):
            return False
        return hardware.measured or EngineSpeed(longer, shape, hardware, engine_of(longer, hardware)).has_room

    trained = trained_tokens(shape.name) or LONGEST + question.generated
    return replace(question, prompt_tokens=longest_prompt(runs, max(trained - question.generated, 1) + 1) or 1)
