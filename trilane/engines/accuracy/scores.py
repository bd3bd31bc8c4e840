"""Measured rows with every prediction of them: held out, as shipped, and by two closed forms to compare with.

These are bytes over data-sheet bandwidths, and llmfit's. Neither knows fixed times, what a processor reaches of its
data sheet, or what an engine does. The null model of policies (``sim.runs.null_model``) is another one, with the
bandwidths that a machine reaches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sim.costs.engine import FittedEngine, load_fitted
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.errors import TrilaneError
from trilane.common.quoting import quoted
from trilane.engines.accuracy.errors import (
    QUANTITIES,
    SCORED_QUALITIES,
    Errors,
    Predictions,
    Quantity,
    Speeds,
    error_of,
    error_table,
    measured,
    read_predictions,
    regime_of_row,
)
from trilane.engines.accuracy.measured_rows import (
    MeasuredRow,
    RowsError,
    context_of,
    machine_of,
    predict,
    read_rows,
    shape_of,
    split_of,
)
from trilane.engines.split_speed import StaticSplit

LLMFIT_GPU, LLMFIT_ALL = 0.55, 0.8  # shares of the GPU's bandwidth, and of the sum


class BytesRead(NamedTuple):
    """Bytes that a token reads on either side; keys and values lie where attention is computed."""

    gpu_weights: float
    cpu_weights: float
    cache: float


def token_bytes(shape: ModelShape, hardware: Hardware, split: StaticSplit, context: int) -> BytesRead:
    """With ``context`` tokens in the KV cache. ``gpu``: the CPU where there is no GPU."""
    sizes = [shape.top_k * size for size in shape.expert_bytes_by_layer]
    on_cpu = 0.0 if hardware.cpu_only else sum(sizes[: split.cpu_layers]) * (1 - split.gpu_experts / shape.experts)
    return BytesRead(weights_of_others(shape) + sum(sizes) - on_cpu, on_cpu, shape.cache_bytes(context))


def weights_of_others(shape: ModelShape) -> float:
    """Bytes of weights outside the routed experts that a token reads; of the embeddings one row, which is left out."""
    embedding = 0.0 if shape.tied_embeddings else shape.vocab * shape.hidden * shape.dense_bits / 8
    return shape.non_expert_bytes - embedding


def data_sheet(row: MeasuredRow) -> Speeds:
    """Bytes over data-sheet bandwidths, one after the other; of prompts products over the 16-bit rate, too.

    Raises what ``load_model``, ``load_hardware`` and ``load_fitted`` raise.
    """
    shape, hardware, split = shape_of(row), machine_of(row.machine), split_of(row)
    read = token_bytes(shape, hardware, split, context_of(row))
    gpu_s = (read.gpu_weights + read.cache) / hardware.gpu.bandwidth_bytes_per_s
    decode_s = gpu_s + read.cpu_weights / hardware.cpu.dram_bytes_per_s
    if row.prompt_tokens is None:
        return Speeds(1 / decode_s)
    prompt_s = sheet_prompt_s(shape, hardware, load_fitted(row.engine), split, row.prompt_tokens)
    return Speeds(1 / decode_s, row.prompt_tokens / prompt_s)


def sheet_prompt_s(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, tokens: int
) -> float:
    """Seconds of a prompt. Experts in DRAM are computed or copied as the engine does it; those that are copied cross
    the link once a piece, all of a layer.
    """
    cpu_layers = 0 if hardware.cpu_only else min(split.cpu_layers, shape.moe_layers)
    away = cpu_layers * (1 - split.gpu_experts / shape.experts)  # layers of experts in DRAM
    expert_flops = 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width * shape.top_k * tokens
    flops = 2.0 * weights_of_others(shape) * 8 / shape.dense_bits * tokens + shape.moe_layers * expert_flops
    if split.repacked or engine.prompt.experts.value == "computed":
        on_cpu = away * expert_flops
        return (flops - on_cpu) / hardware.gpu.flops_per_s + on_cpu / hardware.cpu.flops_per_s
    pieces = -(-tokens // min(split.piece_tokens or engine.prompt.piece_tokens.value, tokens))
    copied = pieces * away / shape.moe_layers * shape.routed_bytes
    return flops / hardware.gpu.flops_per_s + copied / hardware.link.theory_bytes_per_s


def llmfit(row: MeasuredRow) -> Speeds:
    """0.8 / (active bytes in DRAM / its bandwidth + active bytes in GPU memory / (0.55 x its bandwidth)), of weights.

    From AlexsJones/llmfit, llmfit-core/src/fit.rs. It has no speed of prompts. Without a GPU all bytes are in DRAM.
    """
    hardware = machine_of(row.machine)
    read = token_bytes(shape_of(row), hardware, split_of(row), 0)
    reached = 1.0 if hardware.cpu_only else LLMFIT_GPU
    gpu_s = read.gpu_weights / (reached * hardware.gpu.bandwidth_bytes_per_s)
    return Speeds(LLMFIT_ALL / (read.cpu_weights / hardware.cpu.dram_bytes_per_s + gpu_s))


HELD_OUT, SHIPPED, DATA_SHEET, LLMFIT = "held out", "shipped", "data sheet", "llmfit"


@dataclass(frozen=True)
class Scores:
    """Rows that can be asked, and predictions of them by their names, of which the first count."""

    rows: Sequence[MeasuredRow]
    predictions: Mapping[str, Predictions]
    left_out: Mapping[str, str]  # why other rows were not asked, by their ids

    @property
    def first(self) -> Predictions:
        """The predictions that count."""
        return next(iter(self.predictions.values()))

    @property
    def counted(self) -> list[MeasuredRow]:
        """Rows that are more than a sanity check."""
        return [row for row in self.rows if row.quality in SCORED_QUALITIES]

    def table(self) -> dict[tuple[Quantity, str, str], dict[str, Errors]]:
        """Errors by the name of the predictions, for each line of the first ones' table."""
        tables = {
            name: {(line.quantity, line.by, line.group): line.errors for line in error_table(self.rows, predictions)}
            for name, predictions in self.predictions.items()
        }
        keys = tables[next(iter(tables))]
        return {key: {name: table[key] for name, table in tables.items() if key in table} for key in keys}

    def furthest(self, quantity: Quantity, beyond: float) -> list[tuple[MeasuredRow, float]]:
        """Rows with larger errors than ``beyond``, as factors of too fast or too slow, the worst first."""
        errors = [(row, error_of(row, self.first, quantity)) for row in self.rows]
        far = [(row, error) for row, error in errors if error is not None and factor(error) > 1 + beyond]
        return sorted(far, key=lambda pair: -factor(pair[1]))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: errors by group, every row's speeds, and what was left out."""
        lines = [
            {"speed": quantity, "by": by, "group": group, "errors": {name: vars(e) for name, e in errors.items()}}
            for (quantity, by, group), errors in self.table().items()
        ]
        return {"errors": lines, "rows": [self.facts(row) for row in self.rows], "left_out": dict(self.left_out)}

    def facts(self, row: MeasuredRow) -> dict[str, Any]:
        """A row's setting and speeds."""
        speeds = {"measured": measured(row)} | {
            name: predicted.get(row.id, Speeds()) for name, predicted in self.predictions.items()
        }
        return {
            "id": row.id, "model": row.shape_name, "machine": row.machine, "engine": row.engine,
            "regime": regime_of_row(row), "quality": row.quality,
            **{quantity: {name: speed.of(quantity) for name, speed in speeds.items()} for quantity in QUANTITIES},
        }


def factor(error: float) -> float:
    """How many times too fast or too slow."""
    return max(1 + error, 1 / (1 + error))


def bundled_scores() -> Scores:
    """Scores of the rows that come with the program. Raises RowsError."""
    rows = read_rows()
    scored = [row for row in rows if not row.left_out]
    reasons = {row.id: row.left_out for row in rows if row.left_out}
    return Scores(scored, {HELD_OUT: read_predictions(), **_predictions(scored)}, reasons)


def scores_of(path: str) -> Scores:
    """Scores of a user's rows, with the engines as shipped. Rows with names that are unknown are left out.

    Raises RowsError for a file that cannot be read, and where no row can be asked.
    """
    rows = read_rows(path)
    reasons = {row.id: reason for row in rows if (reason := row.left_out or _refusal(row))}
    scored = [row for row in rows if row.id not in reasons]
    _check_ids(rows, path)
    if not scored:
        example = next(iter(reasons.values()), "it has none")
        raise RowsError(f"{path}: expected rows that can be asked; {example}")
    return Scores(scored, _predictions(scored), reasons)


def row_of(rows: Sequence[MeasuredRow], row_id: str) -> MeasuredRow:
    """The row with this id. Raises RowsError."""
    for row in rows:
        if row.id == row_id:
            return row
    some = ", ".join(row.id for row in rows[:10])
    raise RowsError(f"there is no row {quoted(row_id)}; ids are {some} ...; `trilane accuracy --json -` lists them all")


def _check_ids(rows: Sequence[MeasuredRow], path: str) -> None:
    """Raises RowsError for an id that is there twice."""
    for row_id, count in Counter(row.id for row in rows).items():
        if count > 1:
            raise RowsError(f"{path}: expected an id of its own for every row, {quoted(row_id)} is there twice")


def _refusal(row: MeasuredRow) -> str:
    """Why a row cannot be asked, or nothing."""
    try:
        _shipped(row)
        regime_of_row(row)
    except TrilaneError as error:
        return str(error)
    return ""


def _predictions(rows: Sequence[MeasuredRow]) -> dict[str, Predictions]:
    forms: Mapping[str, Callable[[MeasuredRow], Speeds]] = {SHIPPED: _shipped, DATA_SHEET: data_sheet, LLMFIT: llmfit}
    return {name: {row.id: form(row) for row in rows} for name, form in forms.items()}


def _shipped(row: MeasuredRow) -> Speeds:
    predicted = predict(row)
    return Speeds(predicted.decode_tokens_per_s, predicted.prompt_tokens_per_s)
