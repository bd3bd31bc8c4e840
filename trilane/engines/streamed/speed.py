"""Decode speed of a program that reads experts with readers of its own, from parts alone.

A token's experts are in slots of the GPU or of the host's memory, in the page cache where reads go through it, or on
the disk. A layer has as many reads under way as it lacks experts, at most one a reader. A direct read that is larger
than ``PIECE_BYTES`` is split into such pieces, which are under way together; through the page cache, a read's pieces
are those that the system reads ahead, one after another.

Slots are those of a program that has run before, or empty at first (``starts_empty``): then a short answer reads most
of its experts for the first time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from sim.costs.engine import load_fitted
from sim.machine.disks import disk
from sim.machine.hardware import Hardware
from traces.batches import layer_uses
from traces.library import load_trace
from traces.models.shape import ModelShape
from traces.trace import Trace
from trilane.common.units import GIB
from trilane.engines.hit_curve import HitCurve, lru_hit_rates, replayed
from trilane.engines.question import PROMPT_ROWS, Question
from trilane.engines.routing import routing_for, synthetic_names
from trilane.engines.speed import EngineSpeed
from trilane.engines.streamed.kinds import StreamedEngine

PIECE_BYTES = 256 << 10  # the largest reads of the table that gives disks their numbers
AHEAD_BYTES = 128 << 10  # read_ahead_kb of Linux; an HX 370 reads experts one by one at 0.71 GB/s (colibri's notes)
COPY_BYTES_PER_S, MOST_COPY_BYTES_PER_S = 11.6e9, 41e9  # from the page cache, by 1 and 16 threads (apache/lucene#16044)
SYSTEM_BYTES = 4e9  # as engines with a mapped file leave to the system
_MOST_STEPS = 128  # of an answer, which are played from empty slots
_ROOM = 1e12  # GPU memory for any of these models
_SHARES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)


@dataclass(frozen=True)
class StreamedSetting:
    """Settings of a user. ``slots_bytes``: experts in the host's memory; None: as many as the program takes.
    ``gpu_bytes``: experts on the GPU; ``dense_on_gpu``: all else, too. ``tokens_per_pass``: with drafts; None, the
    program's own; 1, no drafts. ``direct`` and ``readers``: None, the program's own."""

    slots_bytes: float | None = None
    gpu_bytes: float = 0.0
    dense_on_gpu: bool = False
    tokens_per_pass: float | None = None
    direct: bool | None = None
    readers: int | None = None


@dataclass(frozen=True)
class StreamedSpeed:
    """A question's mean token, in parts. The question has ``ram_gb`` and ``disk``."""

    engine: StreamedEngine
    shape: ModelShape
    question: Question
    setting: StreamedSetting = StreamedSetting()

    @cached_property
    def token_ns(self) -> float:
        """Time of what is computed, and of what is read and not hidden by it."""
        there = self.experts_ns * self.hit_rate
        hidden = min(there, self.read_ns) if self.engine.overlaps.value else 0.0
        return self.dense_ns + self.experts_ns + self.read_ns - hidden

    @cached_property
    def hit_rate(self) -> float:
        """Share of a token's experts in slots of the GPU or of the host."""
        return self._rate(self.slots_bytes + self.setting.gpu_bytes)

    @property
    def disk_bytes(self) -> float:
        """Bytes read from the disk for a token."""
        return self._missed_bytes - self._cached_bytes

    @cached_property
    def read_ns(self) -> float:
        """Time of a token's reads, from the disk and from the page cache."""
        pieces = self.engine.reads_per_expert.value
        request = self._expert_bytes / pieces
        at_once = min(self.setting.readers or self.engine.readers.value, max(self._missed_by_layer, 1) * pieces)
        size = min(PIECE_BYTES if self.direct else AHEAD_BYTES, request)
        depth = at_once * request / size if self.direct else at_once
        read = self.disk_bytes / disk(str(self.question.disk)).bytes_per_s(size, depth)
        return (read + self._cached_bytes / min(COPY_BYTES_PER_S * at_once, MOST_COPY_BYTES_PER_S)) * 1e9

    @cached_property
    def dense_ns(self) -> float:
        """Time of all that is not routed; where the program computes as another engine does, of the experts, too."""
        if self.setting.dense_on_gpu:
            gpu = self._hardware.gpu
            rate = gpu.bandwidth_bytes_per_s * gpu.bandwidth_fraction
        elif self.engine.like is not None:
            return self._computed_as(self.engine.like)
        else:
            rate = self._cpu_bytes_per_s
        return self.shape.product_bytes / self._tokens_per_pass / rate * 1e9

    @cached_property
    def experts_ns(self) -> float:
        """Time of the experts that the CPU computes; those of adjacent tokens that are the same, once a pass."""
        if self.engine.like is not None:
            return 0.0
        repeated = self.engine.repeated.value if self.engine.repeated else 0.0
        positions = 1 + self._drafts * (1 - repeated)
        on_gpu = self._rate(self.setting.gpu_bytes) if self.setting.gpu_bytes else 0.0
        used = self._token_bytes * positions / self._tokens_per_pass
        return used * (1 - on_gpu) / self._cpu_bytes_per_s * 1e9

    @cached_property
    def slots_bytes(self) -> float:
        """Experts that the host's memory keeps for the program."""
        if self.setting.slots_bytes is not None:
            return self.setting.slots_bytes
        return max(self.budget_bytes - self.fixed_bytes, 0.0)

    @property
    def budget_bytes(self) -> float:
        """Memory that the program takes by itself."""
        return self._free_bytes * self.engine.ram_share.value

    @property
    def most_slots_bytes(self) -> float:
        """Experts for which there is memory."""
        return max(self._free_bytes - self.fixed_bytes, 0.0)

    @property
    def direct(self) -> bool:
        """True if reads go past the page cache."""
        return self.engine.direct.value if self.setting.direct is None else self.setting.direct

    @property
    def _free_bytes(self) -> float:
        return (self.question.ram_gb or 0) * GIB - SYSTEM_BYTES

    @property
    def fixed_bytes(self) -> float:
        """Memory for all that is not routed."""
        return self.shape.non_expert_bytes + self.engine.other_bytes.value

    @property
    def _expert_bytes(self) -> int:
        return max(self.shape.expert_bytes_by_layer)

    @property
    def _token_bytes(self) -> int:
        """Bytes of the experts that a token chooses."""
        return self.shape.top_k * sum(self.shape.expert_bytes_by_layer)

    @property
    def _drafts(self) -> int:
        return self.engine.drafts.value if self.engine.drafts and self.setting.tokens_per_pass != 1 else 0

    @property
    def _tokens_per_pass(self) -> float:
        if not self._drafts or self.engine.accepted is None:
            return 1.0
        return self.setting.tokens_per_pass or 1 + self.engine.accepted.value

    @property
    def _chosen_bytes(self) -> float:
        """Bytes of the experts that all positions of a pass choose, for each token that it gives."""
        return self._token_bytes * (1 + self._drafts) / self._tokens_per_pass

    @property
    def _missed_bytes(self) -> float:
        return self._chosen_bytes * (1 - self.hit_rate)

    @property
    def _missed_by_layer(self) -> float:
        """Experts that a layer lacks in a pass."""
        return self.shape.top_k * (1 + self._drafts) * (1 - self.hit_rate)

    @property
    def _cached_bytes(self) -> float:
        """Bytes that the slots lack and the page cache has."""
        if self.direct:
            return 0.0
        pages = max(self.most_slots_bytes - self.slots_bytes, 0.0)
        held = self._rate(self.slots_bytes + self.setting.gpu_bytes + pages)
        return self._chosen_bytes * max(held - self.hit_rate, 0.0)

    def _rate(self, held_bytes: float) -> float:
        """Hit rate of an LRU cache. One that is not empty at first has experts that the routing has not used yet as
        ``engines.disk`` says.

        A cache of all layers with less room than a token's experts misses them all: the least recently used is the next
        one (Helldez/BigMoeOnEdge docs/cache-sizing.md).
        """
        held = min(held_bytes / self.shape.routed_bytes, 1.0)
        if not self.engine.per_layer.value and held < self.shape.top_k / self.shape.experts:
            return 0.0
        curve = (per_layer_curve if self.engine.per_layer.value else replayed)(self._trace)
        before = 0.0 if self.engine.starts_empty.value else held * curve.first_uses
        return min(float(curve.rates(np.asarray(held))) + before, 1.0)

    @property
    def _trace(self) -> Trace:
        """Routing that answers the question; from empty slots, of its own lengths."""
        if not self.engine.starts_empty.value:
            return routing_for(self.question).trace
        asked = self.question
        lengths = 1, min(asked.prompt_tokens, PROMPT_ROWS), min(asked.generated, _MOST_STEPS)
        return load_trace(synthetic_names(asked.model, lengths, (), ())[0])

    @cached_property
    def _hardware(self) -> Hardware:
        return self.question.load_machine()

    @property
    def _cpu_bytes_per_s(self) -> float:
        """Rate at which the program's kernels multiply weights on all cores."""
        core, cpu = self.engine.core_bytes_per_s, self._hardware.cpu
        assert core is not None  # of programs that are not like another engine
        return min(core.value * cpu.cores, cpu.read_bytes_per_s)

    def _computed_as(self, engine: str) -> float:
        """Time of a token in an engine that has everything in memory."""
        hardware = self._hardware.with_numbers({"gpu.memory_bytes": _ROOM})
        question = replace(self.question, disk=None, ram_gb=None)
        return EngineSpeed(question, self.shape, hardware, load_fitted(engine)).decode.total_ns


@lru_cache(maxsize=4)
def per_layer_curve(trace: Trace) -> HitCurve:
    """Hit rates of an LRU cache a layer, by the share of its experts."""
    shape, uses = trace.shape, [*layer_uses(trace)]
    slots = [max(round(share * shape.experts), 1) for share in _SHARES]
    rates = []
    for layer, size in enumerate(shape.expert_bytes_by_layer):
        own = [use for use in uses if use.layer == layer]
        rates.append(lru_hit_rates(own, shape.expert_bytes_by_layer, [count * size for count in slots]))
    means = tuple(float(rate) for rate in np.mean(rates, axis=0))
    return HitCurve(_SHARES, means, 1 - means[-1])
