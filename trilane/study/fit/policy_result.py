"""One policy's answer: the times of its steps, and all that is said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from policies.mechanism.session import Session
from policies.parts.caches import StaticCache
from policies.protocols import Needs
from sim.runs.bounds import bounds_of, lower_bound
from sim.runs.memory import MemoryPlan
from sim.runs.metrics import Metrics, metrics_of
from sim.runs.prepare import Prepared
from sim.runs.spans import Row, Span, spans_frame
from sim.simulate import spans_of
from trilane.study.fit.answer_steps import half_of, mean_of_answer, one_by_one
from trilane.study.fit.asked import Asked, token_by_token

MS = 1e6
_KIND = Span._fields.index("kind")

Residents: TypeAlias = tuple[tuple[int, ...], ...]  # by layer


class Times(NamedTuple):
    """In ms, over the whole answer. TTFT is None for a policy that could not play the whole prompt."""

    ttft_ms: float | None
    tpot_ms: float

    def answer_ms(self, tokens: int) -> float:
        """Until the last of ``tokens`` is there; without the prompt, if that was not played."""
        return (self.ttft_ms or 0.0) + (tokens - 1) * self.tpot_ms


@dataclass(frozen=True)
class Answer:
    """What one policy does with the question. Times are those of the whole answer (``fit.answer_steps``); hit rate,
    copied bytes and shares of the decode steps that were played. Bytes are those of memory it needs."""

    policy: str
    ttft_ms: float | None
    tpot_ms: float
    tokens_per_s: float  # of one sequence
    throughput_tokens_per_s: float  # of all
    answer_ms: float  # until the last token
    host_bytes: int  # experts that the host must hold
    cache_bytes: int
    cache_slots: int
    staging_bytes: int
    hit_rate: float | None  # resident, decode
    pcie_bytes_per_token: float | None
    stall_shares: Mapping[str, float | None]  # of the GPU, by what it waits for
    labels: tuple[str, ...]


def times_of(rows: Sequence[Row], generated: int, steps: int | None = None) -> Times:
    """TTFT and TPOT of a run of which some decode steps stand for others of an answer of ``generated`` tokens.

    Where none does, they are those of ``sim.runs.metrics``. ``steps``: as if only the first so many had been played.
    """
    waits = [Span._make(row) for row in rows if row[_KIND] == "wait"]
    ends = [(wait.phase, wait.end_ns) for wait in waits if wait.layer == -1]
    first = max((end for phase, end in ends if phase == "prefill"), default=0)
    places = [first, *sorted(end for phase, end in ends if phase == "decode")[:steps]]
    played = len(places) - 1
    early = one_by_one(played, generated)
    early_ns, late_ns = ((places[to] - places[of]) / max(to - of, 1) for of, to in ((0, early), (early, played)))
    return Times(first / MS, mean_of_answer(early_ns, late_ns, played, generated) / MS)


class Played(NamedTuple):
    """A policy that was played: what is said of it, and what it came to. ``residents``: experts in the cache in the
    end, by layer. ``half_tpot_ms``: as if only half of the decode steps had been played."""

    answer: Answer
    needs: Needs
    memory: MemoryPlan
    residents: Residents
    half_tpot_ms: float


def play_policy(asked: Asked, prepared: Prepared) -> Played:
    """Play what has been prepared."""
    session = prepared.session()
    host_bytes = host_bytes_of(prepared, session)
    rows = spans_of(prepared, session)
    generated = asked.question.generated
    times, half = times_of(rows, generated), times_of(rows, generated, half_of(asked.steps))
    if token_by_token(prepared.composition):
        times = times._replace(ttft_ms=None)
    answer = _answer(asked, prepared, times, metrics_of(spans_frame(rows), asked.question.batch), host_bytes)
    return Played(answer, prepared.composition.needs, prepared.memory, residents_of(session), half.tpot_ms)


def residents_of(session: Session) -> Residents:
    """The experts in the cache now."""
    return tuple(tuple(sorted(experts)) for experts in session.residency.resident)


def _answer(asked: Asked, prepared: Prepared, times: Times, metrics: Metrics, host_bytes: int) -> Answer:
    return Answer(
        policy=prepared.composition.name,
        ttft_ms=times.ttft_ms,
        tpot_ms=times.tpot_ms,
        tokens_per_s=1e3 / times.tpot_ms,
        throughput_tokens_per_s=asked.question.batch * 1e3 / times.tpot_ms,
        answer_ms=times.answer_ms(asked.question.generated),
        host_bytes=host_bytes,
        cache_bytes=prepared.memory.cache_bytes,
        cache_slots=prepared.memory.slots,
        staging_bytes=prepared.memory.staging_bytes,
        hit_rate=metrics.decode_resident_hit_rate,
        pcie_bytes_per_token=metrics.pcie_bytes_per_token,
        stall_shares=dict(metrics.stall_share),
        labels=prepared.labels,
    )


def bounds_beside(asked: Asked, played: Played) -> Mapping[str, float]:
    """Lower bound and null model of a policy that keeps the routing, in ms, by the names of ``bounds_of``.

    The bound holds for any steps that follow each other, whatever came before: so for those that stand for themselves
    and for the others, and for the same mean of both as TPOT.
    """
    setting, memory = asked.setting, played.memory
    demand, capacity = asked.ready(played.answer.policy).demand, memory.cache_bytes + memory.staging_bytes
    decode = [step for step in demand if step.phase == "decode"]
    early = one_by_one(len(decode), asked.question.generated)
    prefill = [step for step in demand if step.phase == "prefill"]
    first, *halves = (lower_bound(some, setting.costs, capacity) for some in (prefill, decode[:early], decode[early:]))
    early_ns, late_ns = (half.tpot_ns or 0.0 for half in halves)
    bound = first._replace(tpot_ns=mean_of_answer(early_ns, late_ns, len(decode), asked.question.generated))
    return bounds_of(
        demand, setting.costs, capacity, setting.shape, setting.hardware,
        memory.cache_bytes / setting.shape.routed_bytes, played.needs.gpu_only, bound,
    )  # fmt: skip


def host_bytes_of(prepared: Prepared, session: Session) -> int:
    """Expert weights that the host must hold: all of them, or those not on the GPU where these never change.

    Evicted experts are not copied back, so that whatever may leave the GPU must be in the host's memory too. The
    session is a fresh one: what it placed may have left afterwards.
    """
    shape = prepared.shape
    if not isinstance(prepared.composition.cache, StaticCache):
        return shape.routed_bytes
    placed = session.residency.resident
    return sum(
        shape.expert_bytes_of(layer) * (shape.experts - len(experts)) for layer, experts in enumerate(placed)
    )
