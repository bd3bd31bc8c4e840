"""The part of ``trilane fit`` that is simulated: the best policy on an engine without the limits of today's, and its
runners-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.machine.hardware import Hardware
from sim.machine.parts import part
from sim.runs.prepare import Prepared
from sim.runs.run import bounds_of
from sim.runs.vocabulary import Link
from traces.models.shape import ModelShape
from trilane.common.gc_paused import gc_paused
from trilane.common.units import GIB
from trilane.engines.gains import WORTH_NAMING, Gain, limiting_part, ranked
from trilane.engines.host_memory import channels_of, most_ram_gib
from trilane.engines.memory import HOST_RESERVE_BYTES, host_memory_of, need_of
from trilane.engines.question import Question
from trilane.engines.routing import statistics_text
from trilane.fit.policy_result import MemoryUse, PlayedPolicy, PolicyResult, memory_use
from trilane.fit.prepared_question import RESIDENT, all_on_gpu, candidate_names, play_candidates, routing_of
from trilane.fit.sensitivity import Evidence, evidence_of, gains_of, warm_window
from trilane.study.player import check_workers
from trilane.study.pool import WorkerPool

SHOWN = 4
PIECE = 512  # prompt tokens that llama.cpp computes at once by default


class PinnedCopies(NamedTuple):
    """Copies out of pinned memory, where the GPU waits for them."""

    size_bytes: int
    pageable_fraction: float  # of the rate, where so much cannot be pinned


class HostRoom(NamedTuple):
    """Host memory that is needed beyond what the board takes, where its size is not named."""

    need_bytes: int
    channels: int
    memory: str  # kind of modules
    modules: int  # of a channel
    most_gib: int


class FitCaveats(NamedTuple):
    """Reasons for which a real machine may be slower than its parts promise; None where it does not apply."""

    pinned: PinnedCopies | None
    room: HostRoom | None
    one_piece_tokens: int | None  # of a prompt that policies compute at once, which engines do in pieces


@dataclass(frozen=True)
class PolicyAnswer:
    """``best`` has the least time until the last token of the answer."""

    routing: str
    statistics: str  # whose the routing has, and how far hit rates rest on that; empty for recorded routing
    engine: str | None  # of the policies; None: the one with which the machine was profiled
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
    gains: tuple[Gain, ...] | None  # None: not asked for
    limit: str | None  # the part that limits decoding; None: no part by itself, or not known
    supports: tuple[Evidence, ...]
    caveats: FitCaveats


@gc_paused()
def policy_answer(
    question: Question, shape: ModelShape, hardware: Hardware, jobs: int, pool: WorkerPool[Prepared],
    better_parts: bool = True,
) -> PolicyAnswer:
    """Play the candidates in the ``jobs`` processes of ``pool``, and the best of them with ``better_parts``.

    Raises FitError if none can run, what ``prepared_for`` raises, and ChoiceError for a policy that the other processes
    lack.
    """
    policies = candidate_names(question)
    if need_of(shape, hardware, question.batch, question.tokens).all_on_gpu:
        policies = (RESIDENT,)
    check_workers(policies, jobs)
    ranking = play_candidates(question, policies, pool)
    first, *others = ranking.exact[:SHOWN]
    best, prepared = first.result, pool.state.with_policy(first.result.policy)
    bounds = pool.submit(_bounds, best.policy)  # another process works them out while this one plays the warm window
    gains = ranked(gains_of(best.policy, warm_window(prepared, first), pool)) if better_parts else None
    return PolicyAnswer(
        routing=routing_of(question).about,
        statistics=statistics_text(question),
        engine=None if prepared.hardware.measured else question.policy_engine,
        memory=memory_use(prepared.memory, prepared.shape, best),
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
        limit=limiting_part(gains or ()),
        supports=evidence_of(prepared, gains or ()),
        caveats=_caveats(question, prepared, best),
    )


def _bounds(prepared: Prepared, policy: str) -> Mapping[str, float]:
    return bounds_of(prepared.with_policy(policy))


def _equal(best: PlayedPolicy, others: Sequence[PlayedPolicy], answer_tokens: int) -> tuple[str, ...]:
    """Policies whose answers end no later than the best one's by more than the spread of the difference."""
    later = {one.result.policy: one.result.answer_ms - best.result.answer_ms for one in others}
    spread = {one.result.policy: one.decode.spread_of_difference_ms(best.decode) for one in others}
    return tuple(name for name, ms in later.items() if ms <= spread[name] * (answer_tokens - 1))


def _caveats(question: Question, prepared: Prepared, best: PolicyResult) -> FitCaveats:
    hardware = prepared.hardware
    tokens = (prepared.scenario.prompt_tokens or 0) * prepared.scenario.batch
    whole = tokens > PIECE and not all_on_gpu(prepared)
    return FitCaveats(_pinned(hardware, best), _room(question, hardware, best), tokens if whole else None)


def _pinned(hardware: Hardware, best: PolicyResult) -> PinnedCopies | None:
    matter = (best.stall_shares[Link.H2D] or 0.0) >= WORTH_NAMING
    if hardware.link.copies != "pinned" or hardware.measured or not matter:
        return None
    return PinnedCopies(best.host_bytes, hardware.link.pageable_fraction)


def _room(question: Question, hardware: Hardware, best: PolicyResult) -> HostRoom | None:
    memory = part("memory", question.ram) if question.ram else None
    if memory is None or memory.modules is None or host_memory_of(question, hardware) is not None:
        return None
    need, most_gib, channels = best.host_bytes + HOST_RESERVE_BYTES, most_ram_gib(question), channels_of(question)
    if not most_gib or not channels or need <= most_gib * GIB:
        return None
    return HostRoom(need, channels, memory.title, memory.modules.slots.value, most_gib)
