"""One policy's answer: the times of its steps, and, for the few that are shown, everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policies.caches import StaticCache
from sim.engine.spans import Row, Span, spans_frame
from sim.fit.asked import Asked, token_by_token
from sim.results.bounds import bounds_of
from sim.results.metrics import metrics_of
from sim.simulate import Prepared, labels_of, spans_of

MS = 1e6
_KIND = Span._fields.index("kind")


class Times(NamedTuple):
    """In ms; TTFT is None for a policy that could not play the whole prompt."""

    ttft_ms: float | None
    tpot_ms: float

    def answer_ms(self, tokens: int) -> float:
        """Until the last of ``tokens`` is there; without the prompt, if that was not played."""
        return (self.ttft_ms or 0.0) + (tokens - 1) * self.tpot_ms


@dataclass(frozen=True)
class Answer:
    """What one policy does with the question. Bytes are those of memory it needs; shares are of the decode window."""

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


def times_of(rows: Sequence[Row]) -> Times:
    """TTFT and TPOT of a run, as ``sim.results.metrics`` has them, from its spans."""
    waits = [Span._make(row) for row in rows if row[_KIND] == "wait"]
    ends = [(wait.phase, wait.end_ns) for wait in waits if wait.layer == -1]
    first = max((end for phase, end in ends if phase == "prefill"), default=0)
    decode = [end for phase, end in ends if phase == "decode"]
    return Times(first / MS, (max(decode) - first) / len(decode) / MS)


class Played(NamedTuple):
    """A policy that was played; ``rows`` are its spans, from which all else follows."""

    prepared: Prepared
    times: Times
    rows: list[Row]
    host_bytes: int


def play_policy(prepared: Prepared) -> Played:
    """Play what has been prepared."""
    host_bytes = host_bytes_of(prepared)
    rows = spans_of(prepared)
    times = times_of(rows)
    if token_by_token(prepared.composition):
        times = times._replace(ttft_ms=None)
    return Played(prepared, times, rows, host_bytes)


def answer_of(asked: Asked, played: Played) -> Answer:
    """All that is said of a policy that is shown."""
    prepared, times = played.prepared, played.times
    metrics = metrics_of(spans_frame(played.rows), asked.question.batch)
    return Answer(
        policy=prepared.composition.name,
        ttft_ms=times.ttft_ms,
        tpot_ms=times.tpot_ms,
        tokens_per_s=1e3 / times.tpot_ms,
        throughput_tokens_per_s=asked.question.batch * 1e3 / times.tpot_ms,
        answer_ms=times.answer_ms(asked.question.generated),
        host_bytes=played.host_bytes,
        cache_bytes=prepared.memory.cache_bytes,
        cache_slots=prepared.memory.slots,
        staging_bytes=prepared.memory.staging_bytes,
        hit_rate=metrics.decode_resident_hit_rate,
        pcie_bytes_per_token=metrics.pcie_bytes_per_token,
        stall_shares={"h2d": metrics.stall_h2d_share, "cpu": metrics.stall_cpu_share, "host": metrics.stall_host_share},
        labels=labels_of(prepared.composition.needs, asked.setting.trace),
    )


def bounds_beside(asked: Asked, played: Played) -> Mapping[str, float]:
    """Lower bound and null model of a policy that keeps the routing, in ms, by the names of ``bounds_of``."""
    setting, memory = asked.setting, played.prepared.memory
    return bounds_of(
        played.prepared.demand, setting.costs, memory.cache_bytes + memory.staging_bytes, setting.shape,
        setting.hardware, memory.cache_bytes / setting.shape.routed_bytes, played.prepared.composition.needs.gpu_only,
    )  # fmt: skip


def host_bytes_of(prepared: Prepared) -> int:
    """Expert weights that the host must hold: all of them, or those not on the GPU where these never change.

    Evicted experts are not copied back, so that whatever may leave the GPU must be in the host's memory too. To be
    asked before the policy is played: what it placed may have left afterwards.
    """
    shape = prepared.setting.shape
    if not isinstance(prepared.composition.cache, StaticCache):
        return shape.routed_bytes
    placed = prepared.session.residency.resident
    return sum(
        shape.expert_bytes_of(layer) * (shape.experts - len(experts)) for layer, experts in enumerate(placed)
    )
