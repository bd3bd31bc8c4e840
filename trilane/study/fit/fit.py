"""The answer to "what will this model do on that machine?": with an engine of today, and with the best policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sim.machine.hardware import Hardware, load_hardware
from traces.models.shape import ModelShape
from traces.models.trained_length import trained_tokens
from trilane.common.schema import to_dict
from trilane.study.fit.engine_answer import EngineAnswer, engine_answer, has_room
from trilane.study.fit.memory_needed import check_fits, longest_prompt, surely_runs
from trilane.study.fit.policy_answer import PolicyAnswer, policy_answer
from trilane.study.fit.question import FitError, Question

LONGEST = 2**20  # tokens; no prompt of more is looked for where it is not known what a model was trained for


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


def fit(question: Question, jobs: int = 1) -> Fit:
    """Answer a question. ``jobs``: processes that share the work; see ``trilane.study.pool.WorkerPool``.

    Raises FitError for what cannot run, saying by how many GB, and what ``policy_answer`` raises.
    """
    shape, hardware = question.model_shape, load_hardware(question.hardware)
    check_fits(shape, hardware, question)
    engine, refused = _engine(question, shape, hardware)
    return Fit(
        question=question,
        model=shape.name,
        machine=hardware.name,
        about=hardware.about,
        engine=engine,
        engine_refused=refused,
        policies=None if hardware.cpu_only else policy_answer(question, shape, hardware, jobs),
        trained_tokens=trained_tokens(shape.name),
        notes=hardware.notes,
    )


def with_longest_prompt(question: Question) -> Question:
    """The same question with the longest prompt that fits, and that the model was trained for, in whole 256 tokens.

    Raises FitError if none does.
    """
    shape, hardware = question.model_shape, load_hardware(question.hardware)

    def runs(tokens: int) -> bool:
        longer = replace(question, prompt_tokens=tokens)
        return surely_runs(shape, hardware, longer) and (hardware.measured or has_room(longer, shape, hardware))

    trained = trained_tokens(shape.name) or LONGEST + question.generated
    return replace(question, prompt_tokens=longest_prompt(runs, max(trained - question.generated, 1) + 1) or 1)


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
