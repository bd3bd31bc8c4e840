"""Programs with readers of their own, as data: what they keep, how they read, how fast they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sim.machine.sourced import Sourced, read_file
from traces.models.catalogue import load_model, original
from traces.models.names import parted
from traces.models.shape import ModelShape
from trilane.engines.question import FitError

_FILE = Path(__file__).with_name("engines.yaml")


class StreamedFormat(NamedTuple):
    """Bits per weight of a model's experts and of all else."""

    expert_bits: Sourced[float]
    dense_bits: Sourced[float]


class StreamedEngine(NamedTuple):
    """A program; ``engines.yaml`` says what its numbers mean."""

    title: str
    command: str
    models: Mapping[str, StreamedFormat]
    ram_share: Sourced[float]
    other_bytes: Sourced[float]
    per_layer: Sourced[bool]
    starts_empty: Sourced[bool]
    readers: Sourced[float]
    reads_per_expert: Sourced[int]
    direct: Sourced[bool]
    overlaps: Sourced[bool]
    core_bytes_per_s: Sourced[float] | None = None
    like: str | None = None
    on_cpu: bool = False
    drafts: Sourced[int] | None = None
    accepted: Sourced[float] | None = None
    repeated: Sourced[float] | None = None
    direct_word: str | None = None
    no_drafts_word: str | None = None

    def shape(self, model: str, expert_bits: float | None = None) -> ModelShape:
        """A model in the program's format, or with experts of so many bits. Raises FitError for one that it does not
        read."""
        shape = load_model(model)
        own = self.models.get(original(parted(shape.name).model))
        if own is None or parted(shape.name).weights is not None:
            models = " or ".join(self.models)
            raise FitError(f"model {shape.name}: expected {models}, and no format: {self.title} reads its own")
        return replace(shape, weight_bits=expert_bits or own.expert_bits.value, dense_bits=own.dense_bits.value)


@cache
def streamed_engines() -> Mapping[str, StreamedEngine]:
    """The programs by name. Raises HardwareError for a faulty file."""
    read: Mapping[str, StreamedEngine] = read_file(Mapping[str, StreamedEngine], _FILE)
    return read
