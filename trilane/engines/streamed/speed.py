"""Decode speed of a program that reads experts with readers of its own, from parts alone.

A token's experts are in GPU slots, in slots of the host's memory, in the page cache where reads go through it, or on the
disk. Each layer reads what it lacks, with as many requests at once as it lacks experts, at most one a reader. A larger
read than ``PIECE_BYTES`` is split into such pieces, which are under way together; through the page cache, one read
reads ahead by ``AHEAD_BYTES``, one piece after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from sim.costs.engine import load_fitted
from sim.machine.disks import disk
from sim.machine.hardware import Hardware
from traces.batches import layer_uses
from traces.models.shape import ModelShape
from traces.trace import Trace
from trilane.common.units import GIB
from trilane.engines.hit_curve import HitCurve, hit_curve, lru_hit_rates
from trilane.engines.question import Question
from trilane.engines.routing import routing_for
from trilane.engines.speed import EngineSpeed
from trilane.engines.streamed.kinds import StreamedEngine

PIECE_BYTES = 256 << 10  # the largest reads of the table that gives disks their numbers (sim/machine/presets/parts)
AHEAD_BYTES = 128 << 10  # read_ahead_kb of Linux; an HX 370 reads experts one at a time with 0.71 GB/s (colibri's docs)
COPY_BYTES_PER_S, MOST_COPY_BYTES_PER_S = 11.6e9, 41e9  # page cache to a buffer, by one thread and by 16 (apache/lucene issue 16044)
SYSTEM_BYTES = 4e9  # what a system keeps, as engines' memory has it
_SHARES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)


@dataclass(frozen=True)
class StreamedSetting:
    """What a user sets. ``slots_bytes``: experts in the host's memory; None: as many as the program takes.
    ``gpu_bytes``: experts on the GPU. ``tokens_per_pass``: None, the program's own; 1: no drafts. ``direct``: None, the
    program's default."""

    slots_bytes: float | None = None
    gpu_bytes: float = 0.0
    tokens_per_pass: float | None = None
    direct: bool | None = None
    readers: int | None = None


@dataclass(frozen=True)
class StreamedSpeed:
    """A token's time by parts, in the mean."""

    engine: StreamedEngine
    shape: ModelShape
    question: Question
    setting: StreamedSetting = StreamedSetting()

    @cached_property
    def token_ns(self) -> float:
        """Time of a token: what is computed, and what is read and not hidden by it."""
        there = self._experts_ns * self.hit_rate
        missing = self._experts_ns - there
        reads = self.read_ns
        waits = max(there, reads) if self.engine.overlaps.value else there + reads
        return self._dense_ns + waits + missing

    @cached_property
    def hit_rate(self) -> float:
        """Share of a token's experts in slots of the GPU or of the host."""
        return float(self._rates(self._slots_bytes + self.setting.gpu_bytes))

    @property
    def disk_bytes(self) -> float:
        """Read from the disk for a token."""
        return self._read_bytes - self._cached_bytes

    @cached_property
    def read_ns(self) -> float:
        """Time of a token's reads, from the disk and from the page cache."""
        passes = self._positions / self._tokens_per_pass
        missing = self._read_bytes / self.shape.expert_bytes_by_layer[-1] / self.shape.moe_layers / passes
        pieces = self.engine.reads_per_expert.value
        at_once = min(self.setting.readers or self.engine.readers.value, max(missing, 1) * pieces)
        one = self.shape.expert_bytes_by_layer[-1] / pieces
        size = min(PIECE_BYTES if self._direct else AHEAD_BYTES, one)
        depth = at_once * (one / size if self._direct else 1)
        copied = self._cached_bytes / min(COPY_BYTES_PER_S * at_once, MOST_COPY_BYTES_PER_S)
        kind = disk(str(self.question.disk))
        return (self.disk_bytes / kind.bytes_per_s(size, depth) + copied) * 1e9

    @property
    def _direct(self) -> bool:
        return self.engine.direct.value if self.setting.direct is None else self.setting.direct

    @property
    def _drafts(self) -> int:
        return self.engine.drafts.value if self.engine.drafts and self.setting.tokens_per_pass != 1 else 0

    @property
    def _positions(self) -> int:
        """Tokens that a pass computes."""
        return 1 + self._drafts

    @property
    def _tokens_per_pass(self) -> float:
        if not self._drafts or self.engine.accepted is None:
            return 1.0
        return self.setting.tokens_per_pass or 1 + self.engine.accepted.value

    @property
    def _chosen_bytes(self) -> float:
        """Of the experts that all positions of a pass choose, for each token that it gives."""
        one = self.shape.top_k * sum(self.shape.expert_bytes_by_layer)
        return one * self._positions / self._tokens_per_pass

    @property
    def _read_bytes(self) -> float:
        return self._chosen_bytes * (1 - self.hit_rate)

    @property
    def _cached_bytes(self) -> float:
        """Of what is read, that the page cache has."""
        if self._direct:
            return 0.0
        with_pages = self._slots_bytes + self.setting.gpu_bytes + self._page_bytes
        return self._chosen_bytes * max(float(self._rates(with_pages)) - self.hit_rate, 0.0)

    @property
    def _free_bytes(self) -> float:
        return (self.question.ram_gb or 0) * GIB - SYSTEM_BYTES

    @property
    def _fixed_bytes(self) -> float:
        return self.shape.non_expert_bytes + self.engine.other_bytes.value

    @cached_property
    def _slots_bytes(self) -> float:
        if self.setting.slots_bytes is not None:
            return self.setting.slots_bytes
        return max(self._free_bytes * self.engine.ram_share.value - self._fixed_bytes, 0.0)

    @property
    def _page_bytes(self) -> float:
        return max(self._free_bytes - self._fixed_bytes - self._slots_bytes, 0.0)

    def _rates(self, held_bytes: float) -> float:
        curve = per_layer_curve(self._trace) if self.engine.per_layer.value else hit_curve(self.question)
        held = min(held_bytes / self.shape.routed_bytes, 1.0)
        return float(curve.rates(np.asarray(held))) + held * curve.first_uses

    @property
    def _trace(self) -> Trace:
        return routing_for(self.question).trace

    @cached_property
    def _hardware(self) -> Hardware:
        return self.question.load_machine()

    @property
    def _kernel_bytes_per_s(self) -> float:
        share = self.engine.kernel_share
        if share is None:
            raise ValueError("expected a share of the CPU's rate")
        return share.value * self._hardware.cpu.read_bytes_per_s

    @cached_property
    def _experts_ns(self) -> float:
        """Of experts that the CPU computes; next to a ``like`` engine they are part of ``_dense_ns``."""
        if self.engine.like:
            return 0.0
        repeated = self.engine.repeated.value if self.engine.repeated else 0.0
        union = (1 + self._drafts * (1 - repeated)) / self._tokens_per_pass
        one = self.shape.top_k * sum(self.shape.expert_bytes_by_layer)
        on_gpu = float(self._rates(self.setting.gpu_bytes)) if self.setting.gpu_bytes else 0.0
        return one * union * (1 - on_gpu) / self._kernel_bytes_per_s * 1e9

    @cached_property
    def _dense_ns(self) -> float:
        if self.engine.like is None:
            return self.shape.product_bytes / self._tokens_per_pass / self._kernel_bytes_per_s * 1e9
        hardware = self._hardware.with_numbers({"gpu.memory_bytes": 1e12})
        question = replace(self.question, disk=None, ram_gb=None)
        return EngineSpeed(question, self.shape, hardware, load_fitted(self.engine.like)).decode.total_ns


@lru_cache(maxsize=4)
def per_layer_curve(trace: Trace) -> HitCurve:
    """Hit rates of an LRU cache a layer, by the share of its experts."""
    shape, uses = trace.shape, [*layer_uses(trace)]
    sizes = [max(round(share * shape.experts), 1) for share in _SHARES]
    rates = []
    for layer, size in enumerate(shape.expert_bytes_by_layer):
        own = [use for use in uses if use.layer == layer]
        rates.append(lru_hit_rates(own, shape.expert_bytes_by_layer, [slots * size for slots in sizes]))
    means = tuple(float(rate) for rate in np.mean(rates, axis=0))
    return HitCurve(_SHARES, means, 1 - means[-1])
