"""Measured and predicted times of an engine's scenarios, as a table, and how far they agree.

The table of an earlier validation is predicted anew with another profile, or another model of costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Annotated

from realrun.llama_cpp.bench import BenchPoint, quartiles
from realrun.llama_cpp.kernel_engine import piece_ns
from sim.costs.engine import EngineError, FittedEngine
from sim.costs.kernel_costs import kernel_steps
from sim.machine.hardware import Hardware
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from trilane.common.csv_files import read_csv, write_csv
from trilane.common.hints import Name, between
from trilane.engines.accuracy.measured_rows import RowsError
from trilane.engines.accuracy.scores import sheet_prompt_s, token_bytes, weights_of_others
from trilane.engines.split_speed import StaticSplit, decode_time, prompt_time
from trilane.study.validation.engine_plan import EngineScenario

MEDIAN_AIM, WORST_AIM = 0.06, 0.15
QUIET = 0.1  # spread of repeats
_MOST = 1_000_000_000
_From0 = Annotated[int, between(0, _MOST)]
_From1 = Annotated[int, between(1, _MOST)]
_Ms = Annotated[float, between(1e-9, _MOST)]


@dataclass(frozen=True)
class EngineRow:
    """A scenario: the median of its times and their quartiles, what was predicted, and what the null model says; ms.
    ``n_cpu_moe``: see ``EngineScenario``."""

    model: Name
    n_cpu_moe: _From0 | None
    threads: _From1
    depth: _From0
    tokens: _From1
    repeats: _From1
    measured_ms: _Ms
    low_ms: _Ms
    high_ms: _Ms
    predicted_ms: _Ms
    null_ms: _Ms

    @property
    def work(self) -> str:
        if self.tokens > 1:
            return f"a prompt of {self.tokens}"
        return f"decoding at {self.depth:,}" if self.depth else "decoding"

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def null_error(self) -> float:
        """The same of the null model."""
        return self.null_ms / self.measured_ms - 1

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, over the median."""
        return (self.high_ms - self.low_ms) / 2 / self.measured_ms


COLUMNS = (*(field.name for field in fields(EngineRow)), "error")  # of rows.csv


def row_of(
    scenario: EngineScenario, times: Sequence[int], shape: ModelShape, hardware: Hardware, engine: FittedEngine
) -> EngineRow:
    """The row of a scenario with its measured times in ns. Raises what the predictions raise."""
    low, middle, high = (round(ns / 1e6, 4) for ns in quartiles(times))
    model, (threads, depth, tokens), n_cpu_moe = scenario
    predicted = _predicted_ms(shape, hardware, engine, scenario)
    return EngineRow(model, n_cpu_moe, threads, depth, tokens, len(times), middle, low, high, *predicted)


def predicted_anew(row: EngineRow, hardware: Hardware, engine: FittedEngine) -> EngineRow:
    """The same measurement with what ``engine`` predicts, and the null model on ``hardware``. Raises what the model's
    name and the predictions raise."""
    if hardware.cpu_only != (row.n_cpu_moe is None):
        with_gpu, asked = ("without", "with") if row.n_cpu_moe is None else ("with", "without")
        raise RowsError(
            f"{row.model}: measured {with_gpu} a GPU, expected a plan for such a machine, got {hardware.name!r} "
            f"{asked} one"
        )
    scenario = EngineScenario(row.model, BenchPoint(row.threads, row.depth, row.tokens), row.n_cpu_moe)
    predicted_ms, null_ms = _predicted_ms(load_model(row.model), hardware, engine, scenario)
    return replace(row, predicted_ms=predicted_ms, null_ms=null_ms)


def _predicted_ms(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, scenario: EngineScenario
) -> tuple[float, float]:
    """The prediction, and the null model's."""
    times = (predict(shape, hardware, engine, scenario) for predict in (predicted_ns, null_ns))
    predicted, null = (round(ns / 1e6, 4) for ns in times)
    return predicted, null


def predicted_ns(shape: ModelShape, hardware: Hardware, engine: FittedEngine, scenario: EngineScenario) -> int:
    """The time of a step: of one token behind ``depth`` others, or of a piece of a prompt. Raises EngineError."""
    threads, depth, tokens = scenario.point
    if not engine.measured_on(hardware):
        gpu = "" if hardware.cpu_only else " --gpu"
        raise EngineError(
            f"engine {engine.name!r}: expected kernels, measured by trilane profile --engine llama.cpp{gpu}"
        )
    if hardware.cpu_only:
        assert engine.kernels is not None
        return round(piece_ns(kernel_steps(shape, engine.kernels, threads), tokens, depth + tokens))
    split = StaticSplit(_cpu_layers(shape, scenario), threads=threads, piece_tokens=tokens)
    if tokens == 1:
        return decode_time(shape, hardware, engine, split, depth + 1).total_ns
    return prompt_time(shape, hardware, engine, split, tokens, depth).total_ns


def null_ns(shape: ModelShape, hardware: Hardware, engine: FittedEngine, scenario: EngineScenario) -> float:
    """Bytes over the rates of the memories that they are in, one after the other; of prompts the products over the
    arithmetic, and experts over the link, if that takes longer."""
    threads, depth, tokens = scenario.point
    split = StaticSplit(_cpu_layers(shape, scenario), piece_tokens=tokens)
    read = token_bytes(shape, hardware, split, depth + tokens)
    here = hardware.cpu.read_bytes_per_s if hardware.cpu_only else hardware.gpu.bandwidth_bytes_per_s
    read_s = (read.gpu_weights + read.cache) / here + read.cpu_weights / hardware.cpu.read_bytes_per_s
    if tokens == 1:
        return read_s * 1e9
    if not hardware.cpu_only:
        return max(read_s, sheet_prompt_s(shape, hardware, engine, split, tokens)) * 1e9
    expert = shape.matrices_per_expert * shape.hidden * shape.expert_width * shape.top_k
    others = weights_of_others(shape) * 8 / shape.dense_bits
    flops = 2.0 * tokens * (others + shape.moe_layers * expert)
    share = min(threads / hardware.cpu.cores, 1.0)
    return max(read_s * 1e9, flops / (hardware.cpu.flops_per_s * share) * 1e9)


def _cpu_layers(shape: ModelShape, scenario: EngineScenario) -> int:
    """MoE layers among the first blocks, whose experts are with the CPU."""
    return sum(block < (scenario.n_cpu_moe or 0) for block in shape.expert_blocks)


@dataclass(frozen=True)
class EngineSummary:
    """Absolute errors over all rows."""

    rows: int
    median_error: float
    worst_error: float
    median_null_error: float
    median_spread: float
    quiet_rows: int  # those whose repeats spread by less than ``QUIET``
    quiet_median_error: float
    quiet_worst_error: float
    by_work: Mapping[str, tuple[int, float, float]]  # rows, median error, median of the errors with their signs

    @classmethod
    def of(cls, rows: Sequence[EngineRow]) -> EngineSummary:
        """The summary of at least one row."""
        errors = [abs(row.error) for row in rows]
        quiet = [abs(row.error) for row in rows if row.spread < QUIET]
        return cls(
            len(rows), median(errors), max(errors), median(abs(row.null_error) for row in rows),
            median(row.spread for row in rows), len(quiet), median(quiet or [0.0]), max(quiet, default=0.0),
            {work: _of_work(rows, work) for work in dict.fromkeys(row.work for row in rows)},
        )


def _of_work(rows: Sequence[EngineRow], work: str) -> tuple[int, float, float]:
    found = [row.error for row in rows if row.work == work]
    return len(found), median(map(abs, found)), median(found)


def write_rows(rows: Iterable[EngineRow], path: Path) -> None:
    """The table as CSV, whole or not at all."""
    lines = ([*(getattr(row, name) for name in COLUMNS[:-1]), f"{row.error:.4f}"] for row in rows)
    write_csv([COLUMNS, *lines], path)


def read_rows(path: Path) -> list[EngineRow]:
    """The rows of a report's ``rows.csv``. Raises RowsError."""
    rows = read_csv(EngineRow, path, "a table as in a report's rows.csv", RowsError)
    if not rows:
        raise RowsError(f"{path}: expected at least one row")
    return rows
