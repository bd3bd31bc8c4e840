"""Times of experts that the host's memory has no room for, which an engine reads from a file that is mapped.

The page cache keeps what was used last. Threads that compute an expert on the CPU fault its pages in, a share of a
matrix each, and wait for them. A prompt's copies to the GPU go through whole tensors in order, so that the system reads
ahead while they are under way, a window of some pages: those of what is missing wait where the disk takes longer than
they do, and those of what is there hide nothing.

Decoding, the page cache is an LRU cache of experts on the routing that answers the question. It is not empty at first:
an expert that the routing has not used yet is there as often as there is room for any.
Of a prompt's piece, which uses nearly all experts in turn, an LRU cache would keep none. Linux protects pages from
their second use on (Helldez/BigMoeOnEdge docs/cache-sizing.md), so that the share stays for which there is room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sim.machine.disks import FAULT_BYTES, Disk, disk
from traces.models.shape import ExpertWork, ModelShape
from trilane.common.units import GB
from trilane.engines.hit_curve import HitCurve, hit_curve
from trilane.engines.question import Question
from trilane.engines.split_speed import Floats, Layers, Times

FAULTS_ON_WINDOWS = 1  # at once: 0.35 to 0.6 reads were under way in prompts (nibor1896/Crow issue 39)


@dataclass(frozen=True)
class DiskReads:
    """Reads of a question's experts through a page cache of ``room_bytes``."""

    shape: ModelShape
    disk: Disk
    room_bytes: int
    question: Question

    def decode_ns(self, layers: Layers, threads: int, batch: int = 1) -> Floats:
        """Time of a step's misses, with the experts of the first ``layers`` on the host, which ``threads`` compute."""
        host = self._host_bytes(layers)
        held, active = self._held(host), ExpertWork.of(self.shape, batch).active / self.shape.experts
        missing = 1 - self._curve.rates(held) - held * self._curve.first_uses
        missed = (held < 1) * np.maximum(missing, 0.0) * active * host
        return self._ns(missed, threads)

    def prompt_ns(
        self, layers: Layers, threads: int, tokens: int, piece_tokens: int, copies_ns: Times | None
    ) -> Floats:
        """Time that a prompt in pieces waits for its misses; ``copies_ns``: what its copies to the GPU take, None where
        the CPU computes them."""
        host, whole = self._host_bytes(layers), tokens // piece_tokens
        pieces = [(piece_tokens, whole), (tokens % piece_tokens, 1)]
        uses = sum(count * ExpertWork.of(self.shape, size).active for size, count in pieces if size and count)
        missing = 1 - self._held(host)
        missed = missing * uses / self.shape.experts * host
        if copies_ns is None:
            return self._ns(missed, threads)
        return np.maximum(missed / self.disk.in_order_bytes_per_s * 1e9 - missing * copies_ns, 0.0)

    @cached_property
    def _curve(self) -> HitCurve:
        return hit_curve(self.question)

    def _host_bytes(self, layers: Layers) -> Floats:
        """Bytes of the experts of the first layers."""
        sums = np.cumsum([0, *self.shape.expert_bytes_by_layer]) * self.shape.experts
        return np.asarray(sums[layers], np.float64)

    def _held(self, host: Floats) -> Floats:
        """Share of the host's experts for which the page cache has room."""
        return np.minimum(self.room_bytes / np.maximum(host, 1), 1.0)

    def _ns(self, missed: Floats, depth: int) -> Floats:
        """Time to read so many bytes, with what faults read around an expert's matrices."""
        depth = FAULTS_ON_WINDOWS if self.question.system == "windows" else depth
        matrix = max(self.shape.expert_bytes_by_layer) / self.shape.matrices_per_expert
        read = missed * (1 + FAULT_BYTES / 2 / matrix)
        return read / self.disk.bytes_per_s(FAULT_BYTES, depth) * 1e9


def hidden_from_gbps(name: str, prompt_ms: Mapping[str, float], missing: float) -> float | None:
    """GB/s of a disk from which on a prompt's copies hide all of its reads, of the prompt's parts with that disk: the
    link is the limit again. ``missing``: share of the host's experts that its memory has no room for. None where the
    prompt does not wait for the disk, or has no copies that could hide it."""
    waits, copies = prompt_ms.get("disk", 0.0), missing * prompt_ms.get("copies", 0.0)
    if not waits or not copies:
        return None
    return disk(name).ceiling_bytes_per_s.value / GB * (waits + copies) / copies
