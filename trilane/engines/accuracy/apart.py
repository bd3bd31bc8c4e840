"""Rows to which nothing was fitted: layers over several GPUs, experts that the host reads from a disk, those that
programs read with readers of their own, and vLLM.

They have lines of their own in ``trilane accuracy``, and count in no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from trilane.common.csv_files import read_csv
from trilane.common.hints import Count, Name
from trilane.engines.accuracy.errors import (
    QUANTITIES,
    Errors,
    Predictions,
    Quantity,
    Speeds,
    error_of,
    errors_of,
    factor,
)
from trilane.engines.accuracy.measured_rows import BUNDLED, NS, MeasuredRow, RowsError, predict, read_rows
from trilane.engines.question import Question
from trilane.engines.speed import EngineSpeed
from trilane.engines.streamed.rows import streamed_rows

SEVERAL_GPUS, ON_DISK, VLLM = (BUNDLED.with_name(name) for name in ("several_gpus.csv", "on_disk.csv", "vllm.csv"))
WITHIN = 1.5  # times too fast or too slow


@dataclass(frozen=True, kw_only=True)
class DiskRow(MeasuredRow):
    """A measurement where experts were read from a disk: of ``ram_gb`` GiB of memory, and of a kind of disk."""

    ram_gb: Count
    disk: Name

    @property
    def speeds(self) -> Speeds:
        """As ``trilane fit`` predicts them. Raises what ``Question`` and ``EngineSpeed`` raise."""
        question = Question(
            self.model, machine=self.machine, ram_gb=self.ram_gb, weights=self.weights or None, engine=self.engine,
            threads=self.threads, n_cpu_moe=self.cpu_layers, disk=self.disk,
            prompt_tokens=max(self.depth_tokens, 1), generated=self.generated_tokens,
        )
        speed = EngineSpeed.asked(question, question.model_shape, question.load_machine())
        prompt = NS * question.prompt_tokens / speed.prompt.total_ns if self.prompt_tokens else None
        return Speeds(NS / speed.decode.total_ns, prompt)


class ApartLine(NamedTuple):
    """Errors of one kind of rows; ``within``: the share of them that are at most ``WITHIN`` times off."""

    group: str
    quantity: Quantity
    errors: Errors
    within: float


@cache
def apart_lines() -> tuple[ApartLine, ...]:
    """A line for each kind of rows and each kind of speed, with the engines as shipped. Raises RowsError."""
    several, vllm = read_rows(SEVERAL_GPUS), [row for row in read_rows(VLLM) if row.scored]
    disk = read_csv(DiskRow, ON_DISK, "a CSV file of speeds with a disk", RowsError)
    found = {row.id: predict(row) for row in (*several, *vllm)}
    closed = {name: Speeds(one.decode_tokens_per_s, one.prompt_tokens_per_s) for name, one in found.items()}
    on_disk = {row.id: row.speeds for row in disk}
    streamed = streamed_rows()
    by_readers = {row.id: Speeds(NS / row.speed.token_ns, None) for row in streamed}
    return (
        *_lines("several GPUs", several, closed), *_lines("experts on a disk", disk, on_disk),
        *_lines("own readers", streamed, by_readers), *_lines("vLLM", vllm, closed),
    )


def _lines(group: str, rows: Sequence[MeasuredRow], predictions: Predictions) -> Iterator[ApartLine]:
    for quantity in QUANTITIES:
        if errors := errors_of(rows, predictions, quantity):
            off = [error_of(row, predictions, quantity) for row in rows if not row.sets(quantity)]
            near = [factor(error) <= WITHIN for error in off if error is not None]
            yield ApartLine(group, quantity, errors, sum(near) / len(near))
