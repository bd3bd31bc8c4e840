"""Programs with readers of their own, as data: what they keep, how they read, how fast they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sim.machine.sourced import Sourced, read_file
from traces.models.catalogue import load_model
from traces.models.names import parted
from traces.models.shape import ModelShape

_FILE = Path(__file__).with_name("engines.yaml")


class StreamedFormat(NamedTuple):
    """Bits per weight of a model's experts and of all else."""

    expert_bits: Sourced[float]
    dense_bits: Sourced[float]


class StreamedEngine(NamedTuple):
    """A program; ``engines.yaml`` says what its numbers mean."""

    title: str
    models: Mapping[str, StreamedFormat]
    ram_share: Sourced[float]
    other_bytes: Sourced[float]
    per_layer: Sourced[bool]
    readers: Sourced[float]
    reads_per_expert: Sourced[int]
    direct: Sourced[bool]
    overlaps: Sourced[bool]
    kernel_share: Sourced[float] | None = None
    like: str | None = None
    drafts: Sourced[int] | None = None
    accepted: Sourced[float] | None = None
    repeated: Sourced[float] | None = None

    def shape(self, model: str, expert_bits: float | None = None) -> ModelShape:
        """A model in the program's format, or with experts of so many bits. Raises KeyError for one it does not read."""
        own = self.models[parted(load_model(model).name).model]
        bits = expert_bits or own.expert_bits.value
        return replace(load_model(model), weight_bits=bits, dense_bits=own.dense_bits.value)


@cache
def streamed_engines() -> Mapping[str, StreamedEngine]:
    """The programs by name. Raises HardwareError for a faulty file."""
    read: Mapping[str, StreamedEngine] = read_file(Mapping[str, StreamedEngine], _FILE)
    return read
