"""Measured speeds of programs that read experts by themselves, a row each.

No number is fitted to them, but slotstream's readers are from the document that has its rows, and the form was changed
once they had been compared (docs/notes/disks.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from trilane.common.csv_files import read_csv
from trilane.common.hints import Count, above, between
from trilane.common.units import GB
from trilane.engines.accuracy.measured_rows import MeasuredRow, RowsError
from trilane.engines.question import Question
from trilane.engines.streamed.kinds import streamed_engines
from trilane.engines.streamed.speed import StreamedSetting, StreamedSpeed

_FILE = Path(__file__).with_name("measured.csv")
_PROMPT_TOKENS = 64  # of programs' benchmarks, which seldom state it


@dataclass(frozen=True, kw_only=True)
class StreamedRow(MeasuredRow):
    """A measurement. ``slots_gb`` and ``gpu_experts_gb``: experts in memory and on the GPU; None: as the program does.
    ``reads``: direct, or empty, as the program does. ``hit_percent``: as the program counts. ``seen``: where the speed
    was read before its prediction was made."""

    expert_bits: Annotated[float, above(0)] | None = None
    slots_gb: Annotated[float, between(0, 1e4)] | None = None
    gpu_experts_gb: Annotated[float, between(0, 1e3)] | None = None
    dense_on_gpu: bool = False
    tokens_per_pass: Annotated[float, between(1, 16)] | None = None
    reads: Literal["", "direct"] = ""
    readers: Count | None = None
    hit_percent: Annotated[float, between(0, 100)] | None = None
    seen: str = ""

    @cached_property
    def speed(self) -> StreamedSpeed:
        """Its prediction. Raises what ``Question`` and ``StreamedEngine.shape`` raise."""
        engine = streamed_engines()[self.engine]
        question = Question(
            self.model, machine=self.machine, ram_gb=self.ram_gb, disk=self.disk, prompt_tokens=_PROMPT_TOKENS,
            generated=self.generated_tokens,
        )
        setting = StreamedSetting(
            None if self.slots_gb is None else self.slots_gb * GB, (self.gpu_experts_gb or 0.0) * GB,
            self.dense_on_gpu, self.tokens_per_pass, True if self.reads else None, self.readers,
        )
        return StreamedSpeed(engine, engine.shape(self.model, self.expert_bits), question, setting)


def streamed_rows() -> list[StreamedRow]:
    """The bundled rows. Raises RowsError."""
    return read_csv(StreamedRow, _FILE, "a CSV file of speeds of programs with readers", RowsError)
