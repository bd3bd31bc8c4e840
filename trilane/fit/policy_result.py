"""The result of one policy: the times of the whole answer, and what the policy needs and does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from policies.mechanism.session import Session
from policies.parts.caches import StaticCache
from sim.runs.columns import Columns, columns_of_rows
from sim.runs.host_memory import host_bytes_of
from sim.runs.memory import MemoryPlan
from sim.runs.metrics import metrics_of, played_steps
from sim.runs.prepare import Prepared
from sim.runs.run import labels_of
from sim.runs.sampling import weights_of
from sim.simulate import spans_of
from traces.models.shape import ModelShape
from trilane.engines.memory import HOST_RESERVE_BYTES

Residents: TypeAlias = tuple[tuple[int, ...], ...]  # experts in the cache, by layer
Floats: TypeAlias = npt.NDArray[np.float64]
BLOCKS, _ERRORS = 8, 2  # of steps; of the standard error in a spread


class DecodeSteps(NamedTuple):
    """The time of each decode step that was played, in ms, and the number of tokens that it stands for.

    A spread is twice the standard error of the mean, by leaving out one block of consecutive steps after the other (a
    jackknife: neighbours are alike). Two policies are compared step by step, since both play the same routing. What
    other prompts would add is not in it.
    """

    ms: Floats
    weights: Floats

    @property
    def mean_ms(self) -> float:
        """TPOT."""
        return float(np.average(self.ms, weights=self.weights)) if len(self.ms) else 0.0

    @property
    def spread_ms(self) -> float:
        """Spread of TPOT in ms; 0 for fewer than two steps."""
        if len(self.ms) < 2:
            return 0.0
        blocks = np.array_split(np.arange(len(self.ms)), min(BLOCKS, len(self.ms)))
        without = [DecodeSteps(*(np.delete(values, block) for values in self)).mean_ms for block in blocks]
        return float(_ERRORS * ((len(blocks) - 1) * np.var(without)) ** 0.5)

    def spread_of_difference_ms(self, other: DecodeSteps) -> float:
        """Spread, in ms, of the difference from another policy's TPOT over the same steps."""
        return DecodeSteps(self.ms - other.ms, self.weights).spread_ms


@dataclass(frozen=True)
class PolicyResult:
    """Times and needs of one policy.

    Times and rates are those of the whole answer (``sim.runs.sampling``); bytes are those of the memory that it needs.
    ``ttft_ms`` is None, and ``answer_ms`` without it, where the prompt was not played.
    """

    policy: str
    ttft_ms: float | None
    tpot_ms: float
    spread_ms: float  # of ``tpot_ms`` (``DecodeSteps``)
    tokens_per_s: float  # of one sequence
    throughput_tokens_per_s: float  # of all
    answer_ms: float  # until the last token
    host_bytes: int  # experts that the host must hold, as far as there is room above a disk
    disk_bytes: int  # all others of these
    disk_bytes_per_token: float | None  # read in decode steps; None where the host has room for all experts
    cache_bytes: int
    cache_slots: int
    staging_bytes: int
    hit_rate: float | None  # resident, decode
    pcie_bytes_per_token: float | None
    stall_shares: Mapping[str, float | None]  # of the GPU, by the lane that it waits for
    labels: tuple[str, ...]


@dataclass(frozen=True)
class MemoryUse:
    """GPU memory divided, in bytes, as the recommended policy uses it, and the experts in it."""

    gpu_bytes: int
    every_token_bytes: int  # weights that every token needs
    kv_bytes: int
    staging_bytes: int
    reserve_bytes: int
    cache_bytes: int
    cached_experts: int
    experts: int
    layers: int
    routed_bytes: int  # of all experts
    host_bytes: int  # of those that the host must hold
    disk_bytes: int  # of those for which it has no room
    host_reserve_bytes: int = HOST_RESERVE_BYTES

    @property
    def fixed_bytes(self) -> int:
        """All that is not the expert cache."""
        return self.every_token_bytes + self.kv_bytes + self.staging_bytes + self.reserve_bytes

    @property
    def all_fits(self) -> bool:
        """True if every expert is on the GPU."""
        return self.cached_experts == self.experts


def memory_use(plan: MemoryPlan, shape: ModelShape, played: PolicyResult) -> MemoryUse:
    """The memory of a policy's plan, and what it needs of the host's."""
    return MemoryUse(
        gpu_bytes=plan.gpu_memory_bytes,
        every_token_bytes=plan.non_expert_bytes,
        kv_bytes=plan.kv_bytes,
        staging_bytes=plan.staging_bytes,
        reserve_bytes=plan.reserve_bytes,
        cache_bytes=plan.cache_bytes,
        cached_experts=plan.slots,
        experts=shape.moe_layers * shape.experts,
        layers=shape.moe_layers,
        routed_bytes=shape.routed_bytes,
        host_bytes=played.host_bytes,
        disk_bytes=played.disk_bytes,
    )


class PlayedPolicy(NamedTuple):
    """A result, the experts in the cache after the last step, its decode steps, and TPOT from half of them."""

    result: PolicyResult
    residents: Residents
    decode: DecodeSteps
    half_tpot_ms: float


def play_policy(prepared: Prepared, *given: Session) -> PlayedPolicy:
    """Play a policy, in fresh sessions of it, one a GPU, if they are given. Raises what ``Prepared.checked`` raises."""
    sessions = given or tuple(prepared.sessions_of(Session))
    needed, room = needed_on_host(prepared.shape, sessions), host_bytes_of(prepared.scenario, prepared.shape)
    host_bytes = needed if room is None else min(needed, room)
    spans = columns_of_rows(spans_of(prepared, *sessions))
    decode = decode_steps_of(spans, prepared.answer_tokens)
    batch, answer, memory = prepared.scenario.batch, prepared.answer_tokens, prepared.memory
    metrics = metrics_of(spans, batch, answer, whole_prompt=prepared.whole_prompt)
    tpot_ms = metrics.tpot_ms or 0.0
    result = PolicyResult(
        policy=prepared.composition.name,
        ttft_ms=metrics.ttft_ms,
        tpot_ms=tpot_ms,
        spread_ms=decode.spread_ms,
        tokens_per_s=metrics.tokens_per_s or 0.0,
        throughput_tokens_per_s=metrics.throughput_tokens_per_s or 0.0,
        answer_ms=(metrics.ttft_ms or 0.0) + (prepared.answer_tokens - 1) * tpot_ms,
        host_bytes=host_bytes,
        disk_bytes=needed - host_bytes,
        disk_bytes_per_token=metrics.disk.get("disk_bytes_per_token"),
        cache_bytes=memory.cache_bytes,
        cache_slots=memory.slots,
        staging_bytes=memory.staging_bytes,
        hit_rate=metrics.decode_resident_hit_rate,
        pcie_bytes_per_token=metrics.pcie_bytes_per_token,
        stall_shares=dict(metrics.stall_share),
        labels=labels_of(prepared),
    )
    half = decode_steps_of(spans, answer, half_of(metrics.decode_steps))
    at_the_end = (experts for session in sessions for experts in session.residency.resident)
    residents = tuple(tuple(sorted(experts)) for experts in at_the_end)
    return PlayedPolicy(result, residents, decode, half.mean_ms)


def half_of(steps: int) -> int:
    """Half of the decode steps; one at least, where there are any."""
    return -(-steps // 2)


def decode_steps_of(spans: Columns, answer_tokens: int, most: int | None = None) -> DecodeSteps:
    """The decode steps of an answer, ``most`` of them from the first on, each with the tokens that it stands for."""
    played = played_steps(spans)
    decode = np.flatnonzero(played.decode)[:most]
    step, start, end = played.step[decode], played.start_ns[decode], played.end_ns[decode]
    weights = weights_of(step.tolist(), answer_tokens).of(step)
    return DecodeSteps(end / 1e6 - start / 1e6, weights.astype(float))


def needed_on_host(shape: ModelShape, sessions: Sequence[Session]) -> int:
    """Bytes of experts that the host must hold or read from its disk: all, or those not on a GPU where these never
    change.

    Evicted experts are not copied back, so that whatever may leave the GPU must be in the host's memory too.
    ``sessions``: fresh ones, one a GPU.
    """
    if not all(isinstance(session.policy.cache, StaticCache) for session in sessions):
        return shape.routed_bytes
    resident = [experts for session in sessions for experts in session.residency.resident]
    placed = zip(shape.expert_bytes_by_layer, resident, strict=True)
    return sum(size * (shape.experts - len(experts)) for size, experts in placed)
