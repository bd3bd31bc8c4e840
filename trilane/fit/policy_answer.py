"""The answer for policies: the best one, played on an engine without the limits of today's, and the runners-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim.machine.hardware import Hardware
from sim.runs.prepare import Prepared
from sim.runs.run import bounds_of
from traces.models.shape import ModelShape
from trilane.common.gc_paused import gc_paused
from trilane.engines.gains import Gain, limit_of, ranked
from trilane.engines.memory_needed import need_of
from trilane.engines.question import Question
from trilane.fit import candidates
from trilane.fit.caveats import caveats_of
from trilane.fit.evidence import Evidence, evidence_of
from trilane.fit.policy_result import MemoryUse, PlayedPolicy, PolicyResult, memory_use
from trilane.fit.prepared_question import routing_of
from trilane.fit.sensitivity import gains_of
from trilane.fit.warm_window import warm_window
from trilane.study.player import check_workers
from trilane.study.pool import WorkerPool

SHOWN = 4


@dataclass(frozen=True)
class PolicyAnswer:
    """``best`` has the least time until the last token of the answer."""

    routing: str
    engine: str  # of the policies; "measured" on a profile's machine
    memory: MemoryUse
    best: PolicyResult
    bounds: Mapping[str, float]  # of the best: lower bound and null model, ms
    steps: int  # decode steps that were played; see sim.runs.sampling
    runners_up: tuple[PolicyResult, ...]
    equal: tuple[str, ...]  # runners-up that are no later than the best by more than the spread
    compared: tuple[PolicyResult, ...]  # keep the routing, too, but are not among those to choose from
    changing: tuple[PolicyResult, ...]  # change the routing; without a TTFT where the prompt is repeated
    clairvoyant: PolicyResult | None
    refused: Mapping[str, str]
    gains: tuple[Gain, ...]
    limited_by: str
    supports: tuple[Evidence, ...]
    traps: tuple[str, ...]


@gc_paused()
def policy_answer(
    question: Question, shape: ModelShape, hardware: Hardware, jobs: int, pool: WorkerPool[Prepared]
) -> PolicyAnswer:
    """Play the candidates in the ``jobs`` processes of ``pool`` (``fit.workers``). Raises FitError if none can run,
    what ``prepared_for`` raises, and ChoiceError for a policy that the other processes lack."""
    policies = candidates.names(question)
    if need_of(shape, hardware, question.batch, question.tokens).all_on_gpu:
        policies = (candidates.RESIDENT,)
    check_workers(policies, jobs)
    ranking = candidates.run(question, policies, pool)
    first, *others = ranking.exact[:SHOWN]
    best, prepared = first.result, pool.state.with_policy(first.result.policy)
    bounds = pool.submit(_bounds, best.policy)  # another process works them out while this one plays the warm window
    gains = ranked(gains_of(best.policy, warm_window(prepared, first), pool))
    return PolicyAnswer(
        routing=routing_of(question).about,
        engine="measured" if prepared.hardware.measured else question.policy_engine,
        memory=memory_use(prepared.memory, prepared.shape, best.host_bytes),
        best=best,
        bounds=pool.result_of(bounds),
        steps=sum(step.phase == "decode" for step in prepared.steps),
        runners_up=tuple(other.result for other in others),
        equal=_equal(first, others, prepared.answer_tokens),
        compared=tuple(other.result for other in ranking.compared),
        changing=tuple(other.result for other in ranking.changing),
        clairvoyant=next((other.result for other in ranking.clairvoyant), None),
        refused=ranking.refused,
        gains=gains,
        limited_by=limit_of(gains),
        supports=evidence_of(prepared, gains),
        traps=caveats_of(question, prepared, best, gains),
    )


def _bounds(prepared: Prepared, policy: str) -> Mapping[str, float]:
    return bounds_of(prepared.with_policy(policy))


def _equal(best: PlayedPolicy, others: Sequence[PlayedPolicy], answer_tokens: int) -> tuple[str, ...]:
    """Those whose answers end no later than the best one's by more than the spread of the difference."""
    later = {one.result.policy: one.result.answer_ms - best.result.answer_ms for one in others}
    spread = {one.result.policy: one.decode.spread_of_difference_ms(best.decode) for one in others}
    return tuple(name for name, ms in later.items() if ms <= spread[name] * (answer_tokens - 1))
