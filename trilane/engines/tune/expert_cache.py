"""llama.cpp's cache of experts as a setting: the speeds that it gives with all memory that a split leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from traces.models.shape import ModelShape
from trilane.common.units import MIB
from trilane.engines.hit_curve import HitCurve
from trilane.engines.memory import SplitMemory
from trilane.engines.question import FitError
from trilane.engines.speed import EngineSpeed
from trilane.engines.split_speed import ExpertCache, StaticSplit


def cache_share(memory: SplitMemory, shape: ModelShape) -> float | None:
    """Share of the host's experts in a cache of all memory that a split leaves, in whole MiB, of which one slot is a
    spare. None without room for the experts of one token."""
    largest = max(shape.expert_bytes_by_layer)
    room = -memory.missing_bytes // MIB * MIB - largest
    if room < shape.top_k * largest or memory.host_bytes < MIB:
        return None
    return min(room / memory.host_bytes, 1.0)


@dataclass(frozen=True, kw_only=True)
class CachedSpeed(EngineSpeed):
    """Speeds with all memory that a split leaves as a cache of the host's experts. ``engine``: that of the costs."""

    curve: HitCurve

    @cached_property
    def split(self) -> StaticSplit:
        """The split that the question names. Raises FitError without room for it, or for the experts of one token."""
        own = self.splitter.best()
        held = cache_share(self.splitter.memory(own), self.shape)
        if held is None:
            raise FitError(f"{self.engine.name}: no room for a cache of the experts of one token")
        return replace(own, cache=ExpertCache(float(self.curve.rates(np.array([held]))[0]), held))

    @property
    def cache_mib(self) -> int:
        """The size of the cache: all memory that is left, or what the host's experts take."""
        memory = self.splitter.memory(self.split)
        return min(-memory.missing_bytes, memory.host_bytes + memory.host_bytes // 10) // MIB

    @property
    def words(self) -> list[str]:
        return [*super().words, f"--moe-cache-mib {self.cache_mib}"]
