"""``trilane fit``: what will this model do on that machine?

The engine's part comes from closed forms, at once; policies are simulated after it, where they were named. The
processes that simulate them are begun first: they import what they need while this one prepares the question.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sim.machine.hardware import Hardware
from traces.models.catalogue import trained_tokens
from traces.models.shape import ModelShape
from trilane.common.schema import to_dict
from trilane.engines.memory import longest_prompt, need_of, surely_runs
from trilane.engines.question import USUAL_POLICIES, FitError, Question
from trilane.engines.refusals import check_fits, missing, roomier
from trilane.engines.shortage import NoRoomError, Way
from trilane.engines.speed import EngineAnswer, EngineSpeed, engine_answer, where_it_fits
from trilane.study.pool import WorkerPool

if TYPE_CHECKING:
    from sim.runs.prepare import Prepared
    from trilane.fit.answer import PolicyAnswer  # imports what plays policies


_USUAL_ENGINE = Question.policy_engine
_USUAL_PLAYS = 6  # of the candidates
_ADDED = 2  # llama.cpp and the clairvoyant run
_IMPORTS = ("trilane.fit.prepared_question", "trilane.fit.sensitivity")
LONGEST = 2**20  # tokens; no prompt of more is looked for where it is not known what a model was trained for


def workers(question: Question, shape: ModelShape, hardware: Hardware, jobs: int) -> WorkerPool[Prepared]:
    """At most ``jobs`` processes, one of which is this one; no more than there are candidates to play at a time."""
    named = question.policies or (USUAL_POLICIES,)
    plays = (_USUAL_PLAYS if USUAL_POLICIES in named else _ADDED + 1) + len(named) - 1
    if hardware.cpu_only or need_of(shape, hardware, question.batch, question.tokens).all_on_gpu:
        plays = 1
    processes = min(jobs, plays)
    return WorkerPool(processes, partial(_prepared, question, processes), copied=True, imports=_IMPORTS)


def _prepared(question: Question, processes: int) -> Prepared:
    from trilane.fit.prepared_question import prepared_for  # it takes long to import

    prepared = prepared_for(question)
    return prepared if processes == 1 else prepared.calibrated()


@dataclass(frozen=True)
class Fit:
    """Everything on the page of ``trilane fit``."""

    question: Question
    model: str
    machine: str
    about: str
    engine: EngineAnswer | None  # None: a profile's machine, or ``engine_refused`` says why
    engine_refused: str | None
    policies: PolicyAnswer | None  # None: not asked for, no GPU to offload from, or ``policies_refused`` says why
    policies_refused: str | None
    roomier: tuple[Way, ...]  # where the engine nearly fills a memory: changes that do not, best first
    trained_tokens: int | None  # prompt and answer that the model was trained for; None: not known
    notes: tuple[str, ...]  # caveats of the machine's parts

    @property
    def offloads(self) -> bool:
        """True if some experts are not on the GPU, so that policies have something to decide."""
        found = self.engine
        return found is not None and not found.cpu_only and found.cpu_layers > 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return to_dict(self)


def fit(question: Question, jobs: int = 1) -> Fit:
    """Answer a question. ``jobs``: processes that share the work; see ``trilane.study.pool.WorkerPool``.

    Raises what ``engine_part`` and ``with_policies`` raise.
    """
    return with_policies(engine_part(question), jobs)


def engine_part(question: Question) -> Fit:
    """The answer without policies. Raises FitError for what cannot run, saying by how many GB, and ChoiceError for a
    policy that does not exist."""
    shape, hardware = question.model_shape, question.load_machine()
    _check_policies(question)
    no_room, idle = _no_room(question, shape, hardware), _nothing_to_decide(question, shape, hardware)
    engine, refused = _engine(question, shape, hardware)
    if no_room is not None and engine is None:
        raise no_room if hardware.measured else NoRoomError(missing(question))
    return Fit(
        question=question, model=shape.name, machine=hardware.name, about=hardware.about, engine=engine,
        engine_refused=refused, policies=None,
        policies_refused=idle if no_room is None else str(no_room),
        roomier=() if engine is None else _roomier(question, shape, hardware),
        trained_tokens=trained_tokens(shape.name), notes=hardware.notes,
    )


def _roomier(question: Question, shape: ModelShape, hardware: Hardware) -> tuple[Way, ...]:
    return roomier(where_it_fits(EngineSpeed.asked(question, shape, hardware)))


def _no_room(question: Question, shape: ModelShape, hardware: Hardware) -> NoRoomError | None:
    """The refusal of policies, for which an engine may have room."""
    try:
        if not hardware.cpu_only:
            check_fits(shape, hardware, question)
    except NoRoomError as error:
        return error
    return None


def _nothing_to_decide(question: Question, shape: ModelShape, hardware: Hardware) -> str | None:
    """Why policies are not simulated on several GPUs with room for all experts."""
    if not (hardware.further and need_of(shape, hardware, question.batch, question.tokens).all_on_gpu):
        return None
    return "the GPUs have room for every expert, so that policies have nothing to decide"


def with_policies(found: Fit, jobs: int = 1, better_parts: bool = True) -> Fit:
    """The answer with the policies that were named, or with the usual ones where no engine has an answer, or a trace or
    their engine was named; without any, or without a GPU, as it is. See ``policy_answer``, and what that raises."""
    question = found.question
    of_policies = (question.trace, question.calibration) != (None, None) or question.policy_engine != _USUAL_ENGINE
    if question.policies is None and (found.engine is None or of_policies):
        question = replace(question, policies=(USUAL_POLICIES,))
    shape, hardware = question.model_shape, question.load_machine()
    if question.policies is None or hardware.cpu_only or found.policies_refused is not None:
        return found
    with workers(question, shape, hardware, jobs) as pool:
        from trilane.fit.answer import policy_answer  # here: the other processes import it meanwhile

        return replace(found, policies=policy_answer(question, shape, hardware, jobs, pool, better_parts))


def _check_policies(question: Question) -> None:
    if question.policies is not None:
        from policies.registry import system

        for name in question.policies:
            if name != USUAL_POLICIES:
                system(name)


def _engine(question: Question, shape: ModelShape, hardware: Hardware) -> tuple[EngineAnswer | None, str | None]:
    """The engine's answer, or why there is none. Raises FitError where it is the only answer, or was asked for."""
    settings = (question.engine, question.threads, question.n_cpu_moe, question.ubatch)
    named = any(value is not None for value in settings)
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
        told = NoRoomError(missing(question)) if isinstance(error, NoRoomError) else error
        if named or hardware.cpu_only or hardware.further:
            raise told from None
        return None, str(told)


def with_longest_prompt(question: Question) -> Question:
    """Return the question with the longest prompt that fits, and that the model was trained for, in whole 256 tokens.

    Raises FitError if none does.
    """
    shape, hardware = question.model_shape, question.load_machine()

    def runs(tokens: int) -> bool:
        longer = replace(question, prompt_tokens=tokens)
        if not hardware.further and not surely_runs(shape, hardware, longer):
            return False
        return hardware.measured or EngineSpeed.asked(longer, shape, hardware).has_room

    trained = trained_tokens(shape.name) or LONGEST + question.generated
    return replace(question, prompt_tokens=longest_prompt(runs, max(trained - question.generated, 1) + 1) or 1)
