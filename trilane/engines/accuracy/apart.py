"""Rows to which nothing was fitted: layers over several GPUs, experts that the host reads from a disk, those that
programs read with readers of their own, and vLLM.

They have lines of their own in ``trilane accuracy``, and count in no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from sim.machine.cards import load_machine
from trilane.engines.accuracy.errors import (
    QUANTITIES,
    Errors,
    Quantity,
    Speeds,
    error_of,
    errors_of,
    factor,
)
from trilane.engines.accuracy.measured_rows import BUNDLED, NS, MeasuredRow, RowsError, predict, read_rows
from trilane.engines.question import Question
from trilane.engines.speed import EngineSpeed
from trilane.engines.streamed.rows import StreamedRow, streamed_rows

SEVERAL_GPUS, ON_DISK, VLLM, PARALLEL = (
    BUNDLED.with_name(name) for name in ("several_gpus.csv", "on_disk.csv", "vllm.csv", "parallel.csv")
)
WITHIN = 1.5  # times too fast or too slow


def speeds_of(row: MeasuredRow) -> Speeds:
    """Speeds of a row with the engines as shipped. Raises what ``predict``, ``Question`` and ``EngineSpeed`` raise."""
    if isinstance(row, StreamedRow):
        return Speeds(NS / row.speed.token_ns, None)
    if row.disk:
        return _on_disk(row)
    found = predict(row)
    return Speeds(found.decode_tokens_per_s, found.prompt_tokens_per_s)


def _on_disk(row: MeasuredRow) -> Speeds:
    """As ``trilane fit`` predicts them, which has fewer settings than rows."""
    for name in ("gpu_experts", "repacked", "kv_bits", "copies", "numa", "prompt_depth_tokens", "ts"):
        if getattr(row, name):
            raise RowsError(f"row {row.id}: {name}: expected nothing in rows with a disk, got {getattr(row, name)}")
    if row.sm != "layer":
        raise RowsError(f"row {row.id}: sm: expected layer in rows with a disk, got {row.sm}")
    layers = None if load_machine(row.machine).cpu_only else row.cpu_layers
    question = Question(
        row.model, machine=row.machine, ram_gb=row.ram_gb, weights=row.weights or None, engine=row.engine,
        threads=row.threads, n_cpu_moe=layers, ubatch=row.piece_tokens, disk=row.disk,
        prompt_tokens=max(row.depth_tokens, row.prompt_tokens or 0, 1), generated=row.generated_tokens,
    )
    speed = EngineSpeed.asked(question, question.model_shape, question.load_machine())
    prompt = NS * question.prompt_tokens / speed.prompt.total_ns if row.prompt_tokens_per_s else None
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
    kinds: dict[str, Sequence[MeasuredRow]] = {
        "several GPUs": read_rows(SEVERAL_GPUS), "experts on a disk": read_rows(ON_DISK),
        "own readers": streamed_rows(), "vLLM": [row for row in read_rows(VLLM) if row.scored],
        "cards together": [row for row in read_rows(PARALLEL) if row.scored],
    }
    return tuple(line for group, rows in kinds.items() for line in _lines(group, rows))


def _lines(group: str, rows: Sequence[MeasuredRow]) -> Iterator[ApartLine]:
    predictions = {row.id: speeds_of(row) for row in rows}
    for quantity in QUANTITIES:
        if errors := errors_of(rows, predictions, quantity):
            off = [error_of(row, predictions, quantity) for row in rows if not row.sets(quantity)]
            near = [factor(error) <= WITHIN for error in off if error is not None]
            yield ApartLine(group, quantity, errors, sum(near) / len(near))
