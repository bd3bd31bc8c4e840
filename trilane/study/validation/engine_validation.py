"""An engine measured on full models of random weights, one after the other, next to what its kernels predict.

A plan says what is measured; measured and predicted times are rows of a table. The table of an earlier validation is
predicted anew with another profile, or another model of costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from realrun.errors import RefusedError
from realrun.llama_cpp.bench import BenchPoint, BenchSettings, OpenModel, quartiles, time_points
from realrun.llama_cpp.kernel_numbers import piece_ns
from realrun.llama_cpp.random_gguf import gguf_layout, write_random_gguf
from sim.costs.engine import EngineError, FittedEngine
from sim.costs.kernel_costs import kernel_steps
from sim.machine.hardware import Hardware, load_hardware
from traces.models.catalogue import gguf_architecture, load_model
from traces.models.names import parted
from traces.models.quantisation import weight_blocks
from traces.models.shape import ModelShape
from trilane.common.csv_files import read_csv, write_csv
from trilane.common.errors import TrilaneError
from trilane.common.hints import NOT_EMPTY, Count, Name, between
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml
from trilane.engines.accuracy.measured_rows import RowsError
from trilane.engines.accuracy.scores import sheet_prompt_s, token_bytes
from trilane.engines.command_line import cpu_layers_of
from trilane.engines.split_speed import StaticSplit, decode_time, prompt_time

_Tokens = Annotated[int, between(0, 1_000_000)]
_PASSES = 2


class EnginePlanError(TrilaneError):
    """A plan that cannot be measured."""


class EngineScenario(NamedTuple):
    """One thing that is measured and predicted; a single token is one of an answer. ``n_cpu_moe``: as llama.cpp's
    argument, the model is on the GPU but for the experts of its first blocks; None: no GPU is used."""

    model: str
    point: BenchPoint
    n_cpu_moe: int | None = None


@dataclass(frozen=True)
class EnginePlan:
    """``models``: names in the catalogue with a weight format, such as olmoe-1b-7b@q4_0; ``prompts``: tokens of a
    piece, computed with an empty cache; ``depths``: tokens in the cache while single tokens are decoded.
    ``cpu_parts``: of a model's MoE layers, the parts whose experts stay with the CPU, each a value of ``--n-cpu-moe``;
    none on a machine without a GPU.
    """

    hardware: str
    models: Annotated[tuple[str, ...], NOT_EMPTY]
    threads: Annotated[tuple[Count, ...], NOT_EMPTY]
    depths: tuple[_Tokens, ...] = (0,)
    prompts: tuple[Count, ...] = ()
    repeats: Count = 5
    cpu_parts: tuple[Annotated[float, between(0, 1)], ...] = ()

    @classmethod
    def from_yaml(cls, path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> EnginePlan:
        """Read a plan, with other values of some keys. Raises EnginePlanError naming the file, and what its models and
        its machine raise."""
        document = read_yaml(path, EnginePlanError)
        changed = {**document, **changes} if isinstance(document, dict) else document
        plan: EnginePlan = from_dict(cls, changed, str(path), EnginePlanError)
        plan.check()
        return plan

    def check(self) -> None:
        """Refuse what cannot be written or predicted, before anything is measured. Raises EnginePlanError."""
        self.machine()
        for name in self.models:
            if parted(name).weights is None:
                raise EnginePlanError(f"model {name!r}: expected a weight format after an @, such as {name}@q4_0")
            gguf_layout(load_model(name), gguf_architecture(name))

    def machine(self) -> Hardware:
        """The machine: with a GPU if experts stay with the CPU next to one, or else without. Raises EnginePlanError."""
        found = load_hardware(self.hardware)
        if found.cpu_only and self.cpu_parts:
            raise EnginePlanError(f"hardware {self.hardware!r}: expected one with a GPU, since cpu_parts are given")
        if not found.cpu_only and not self.cpu_parts:
            raise EnginePlanError(
                f"hardware {self.hardware!r}: expected a machine without a GPU, such as none+ddr5-4800, or cpu_parts: "
                f"the parts of a model's layers whose experts stay with the CPU, such as [0, 0.5, 1]"
            )
        return found

    def splits(self, model: str) -> tuple[int | None, ...]:
        """Values of ``--n-cpu-moe`` for a model, the most first, which need the least GPU memory; None: no GPU."""
        if not self.cpu_parts:
            return (None,)
        shape = load_model(model)
        return tuple(sorted({cpu_layers_of(shape, round(part * shape.moe_layers)) for part in self.cpu_parts})[::-1])

    def points(self) -> Iterator[tuple[BenchPoint, int]]:
        """The points to time on each model, and how often: the fullest cache first, with most threads, which fill it;
        in two passes, so that a short disturbance spoils no point.
        """
        of_a_pass, threads = -(-self.repeats // _PASSES), sorted(self.threads, reverse=True)
        for depth in sorted(self.depths, reverse=True):
            yield from [(BenchPoint(each, depth, 1), of_a_pass) for each in threads] * _PASSES
        yield from [(BenchPoint(each, 0, tokens), of_a_pass) for tokens in self.prompts for each in threads] * _PASSES

    @property
    def context_tokens(self) -> int:
        """Tokens that the cache must hold."""
        return max(*self.depths, *self.prompts, 0) + 64


# --- the table --------------------------------------------------------------------------------------------------------

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
        """Time by the null model / measured - 1."""
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
    """A row's measurement with the predictions of ``engine``, and the null model on ``hardware``. Raises what the
    model's name and the predictions raise."""
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
    flops = 2.0 * tokens * (shape.product_params + shape.moe_layers * expert)
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


# --- what is measured -------------------------------------------------------------------------------------------------


def measure_plan(
    plan: EnginePlan, engine: FittedEngine, open_model: OpenModel, folder: Path,
    progress: Callable[[str], None] = lambda _: None, left_out: Callable[[str], None] = lambda _: None,
) -> list[EngineRow]:
    """A row for each scenario. A model's file is removed before the next one is written. ``left_out`` is told of splits
    that the GPU has no room for: they are not measured.

    Raises what ``EnginePlan.machine`` and ``open_model`` raise, the latter for a model's first split.
    """
    rows = []
    for name in plan.models:
        file = folder / "model.gguf"
        progress(f"writing {name}")
        write_model(name, load_model(name), file)
        for number, split in enumerate(plan.splits(name)):
            what = name if split is None else f"{name} --n-cpu-moe {split}"
            progress(f"measuring {what}")
            try:
                with open_model(file, settings_of(plan, name, split)) as context:
                    rows += [
                        row_of(EngineScenario(name, point, split), times, load_model(name), plan.machine(), engine)
                        for point, times in time_points(context, plan.points()).items()
                    ]
            except RefusedError as error:
                if number == 0:
                    raise
                left_out(f"{what} and fewer are not measured: {error}")
                break
        file.unlink()
    return rows


def settings_of(plan: EnginePlan, model: str, n_cpu_moe: int | None) -> BenchSettings:
    """How a model is loaded. On a CPU, a cache of all tokens is filled with copies: llama.cpp moves no windows."""
    keeps_all = all(kind.reach == "full" for kind, _ in load_model(model).attention_counts)
    copies = n_cpu_moe is None and keeps_all
    return BenchSettings(
        plan.context_tokens, max((*plan.prompts, 512)), n_cpu_moe is not None, n_cpu_moe or 0, copies=copies
    )


def write_model(name: str, shape: ModelShape, path: Path) -> None:
    """A model of the catalogue in a weight format, of random weights."""
    write_random_gguf(shape, gguf_architecture(name), weight_blocks(shape, parted(name).weights or ""), path)
