"""The answer to "what will this model do on that machine?": with an engine of today, and with the best policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.machine.hardware import Hardware
from sim.runs.prepare import Prepared
from traces.models.catalogue import trained_tokens
from traces.models.shape import ModelShape
from trilane.common.schema import to_dict
from trilane.engines.engine_answer import EngineAnswer, engine_answer
from trilane.engines.question import FitError, Question
from trilane.fit.policy_answer import PolicyAnswer, policy_answer
from trilane.study.pool import WorkerPool


@dataclass(frozen=True)
class Fit:
    """Everything on the page of ``trilane fit``."""

    question: Question
    model: str
    machine: str
    about: str
    engine: EngineAnswer | None  # None: a profile's machine, or ``engine_refused`` says why
    engine_refused: str | None
    policies: PolicyAnswer | None  # None: there is no GPU to offload from
    trained_tokens: int | None  # prompt and answer that the model was trained for; None: not known
    notes: tuple[str, ...]  # caveats of the machine's parts

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return to_dict(self)


def answered(
    question: Question, shape: ModelShape, hardware: Hardware, jobs: int, pool: WorkerPool[Prepared]
) -> Fit:
    """Answer a question that fits the machine, policies in the ``jobs`` processes of ``pool`` (``fit.workers``)."""
    engine, refused = _engine(question, shape, hardware)
    return Fit(
        question=question,
        model=shape.name,
        machine=hardware.name,
        about=hardware.about,
        engine=engine,
        engine_refused=refused,
        policies=None if hardware.cpu_only else policy_answer(question, shape, hardware, jobs, pool),
        trained_tokens=trained_tokens(shape.name),
        notes=hardware.notes,
    )


def _engine(question: Question, shape: ModelShape, hardware: Hardware) -> tuple[EngineAnswer | None, str | None]:
    """The engine's answer, or why there is none. Raises FitError where it is the only answer, or was asked for."""
    asked = (question.engine, question.threads, question.n_cpu_moe, question.ubatch)
    named = any(value is not None for value in asked)
    if hardware.measured:
        if named or question.kv is not None:
            raise FitError(
                f"fit: {hardware.name!r} is a profile, whose times are those of the engine that was measured: expected "
                f"no engine, threads, kv, n_cpu_moe or ubatch"
            )
        return None, None
    try:
        return engine_answer(question, shape, hardware), None
    except FitError as error:
        if named or hardware.cpu_only:
            raise
        return None, str(error)
