"""The processes that answer a question: begun at once, they import what they need while this one prepares it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.engines.memory import need_of
from trilane.engines.question import Question
from trilane.study.pool import WorkerPool

if TYPE_CHECKING:
    from sim.runs.prepare import Prepared

_USUAL_PLAYS = 6  # of the candidates
_ADDED = 2  # llama.cpp and the clairvoyant run
_IMPORTS = ("trilane.fit.prepared_question", "trilane.fit.candidates", "trilane.fit.sensitivity")


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
