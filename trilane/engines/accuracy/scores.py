"""Measured rows with every prediction of them: held out, as shipped, and by two closed forms to compare with; one
row explained.

These are bytes over data-sheet bandwidths, and llmfit's. Neither knows fixed times, what a processor reaches of its
data sheet, or what an engine does. The null model of policies (``sim.runs.null_model``) is another one, with the
bandwidths that a machine reaches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sim.costs.engine import FittedEngine, load_fitted
from sim.costs.fitted_costs import copy_bytes_per_s
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.errors import TrilaneError
from trilane.common.quoting import quoted
from trilane.engines.accuracy.apart import ApartLine, apart_lines, speeds_of
from trilane.engines.accuracy.coverage import inside_of_kept, inside_of_others
from trilane.engines.accuracy.errors import (
    QUANTITIES,
    Errors,
    Predictions,
    Quantity,
    Speeds,
    error_of,
    error_table,
    factor,
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
from trilane.engines.accuracy.pairs import SettingScore, setting_scores
from trilane.engines.split_speed import DecodeTime, PromptTime, StaticSplit

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
    return BytesRead(shape.product_bytes + sum(sizes) - on_cpu, on_cpu, shape.cache_bytes(context))


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
    flops = 2.0 * shape.product_params * tokens + shape.moe_layers * expert_flops
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
    """Rows that can be asked, and predictions of them by their names, of which the first count. ``apart``: errors of
    rows that are not among them, to which nothing was fitted."""

    rows: Sequence[MeasuredRow]
    predictions: Mapping[str, Predictions]
    left_out: Mapping[str, str]  # why other rows were not asked, by their ids
    inside: Mapping[str, bool]  # whether a row's decode speed is inside the band that is printed with it, by their ids
    apart: tuple[ApartLine, ...] = ()

    @property
    def first(self) -> Predictions:
        """The predictions that count."""
        return next(iter(self.predictions.values()))

    @property
    def counted(self) -> list[MeasuredRow]:
        """Rows that are more than a sanity check, and not at fault."""
        return [row for row in self.rows if row.scored]

    def table(self) -> dict[tuple[Quantity, str, str], dict[str, Errors]]:
        """Errors by the name of the predictions, for each line of the first ones' table."""
        tables = {
            name: {line[:3]: line.errors for line in error_table(self.rows, predictions, self.inside)}
            for name, predictions in self.predictions.items()
        }
        keys = tables[next(iter(tables))]
        return {key: {name: table[key] for name, table in tables.items() if key in table} for key in keys}

    def pairs(self) -> list[SettingScore]:
        """A/B pairs by setting."""
        return setting_scores(self.counted, self.first)

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
        pairs = [one._asdict() for one in self.pairs()]
        rows = [self.facts(row) for row in self.rows]
        apart = [{**one._asdict(), "errors": vars(one.errors)} for one in self.apart]
        return {"errors": lines, "pairs": pairs, "apart": apart, "rows": rows, "left_out": dict(self.left_out)}

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


def bundled_scores() -> Scores:
    """Scores of the rows that come with the program. Raises RowsError."""
    rows = read_rows()
    scored = [row for row in rows if not row.left_out]
    reasons = {row.id: row.left_out for row in rows if row.left_out}
    held_out = read_predictions()
    inside = inside_of_others(scored, held_out)
    return Scores(scored, {HELD_OUT: held_out, **_predictions(scored)}, reasons, inside, apart_lines())


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
    predictions = _predictions(scored)
    return Scores(scored, predictions, reasons, inside_of_kept(scored, predictions[SHIPPED]))


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
        speeds_of(row)
        regime_of_row(row)
    except TrilaneError as error:
        return str(error)
    return ""


def _predictions(rows: Sequence[MeasuredRow]) -> dict[str, Predictions]:
    forms: Mapping[str, Callable[[MeasuredRow], Speeds]] = {SHIPPED: speeds_of, DATA_SHEET: data_sheet, LLMFIT: llmfit}
    return {name: {row.id: form(row) for row in rows} for name, form in forms.items()}


# --- one row explained ------------------------------------------------------------------------------------------------


NS = 1e9
OTHERS, CPU_EXPERTS = "gates, shared experts, dense layers, head", "experts on the CPU"
Unit = Literal["GB/s", "TFLOP/s", "us a layer", "us a token"]
_PER_NS = {"GB/s": 1.0, "TFLOP/s": 1e-3}  # of bytes and of operations


@dataclass(frozen=True)
class TimePart:
    """A part of a time. ``amount``: bytes, operations, layers or tokens, by the ``unit`` of its rate."""

    name: str
    ns: float
    amount: float
    unit: Unit

    def rate(self, ns: float | None = None) -> float:
        """In ``unit``; of ``ns`` in place of its own time."""
        time = self.ns if ns is None else ns
        return self.amount / time * _PER_NS[self.unit] if self.unit in _PER_NS else time / self.amount / 1e3


@dataclass(frozen=True)
class Explanation:
    """A speed of a row. ``parts``: those that take any time, the longest first; of a token, or of the whole prompt."""

    quantity: Quantity
    tokens: int  # that the parts' time is of
    parts: Sequence[TimePart]
    measured_tokens_per_s: float

    @property
    def predicted_ns(self) -> float:
        """Time of all parts."""
        return sum(part.ns for part in self.parts)

    @property
    def measured_ns(self) -> float:
        """Time of all parts, as measured."""
        return NS * self.tokens / self.measured_tokens_per_s

    @property
    def needed_ns(self) -> float:
        """Time that the longest part would have to take, for all to take as long as measured; it may be below 0."""
        return self.parts[0].ns + self.measured_ns - self.predicted_ns


def explain(row: MeasuredRow) -> list[Explanation]:
    """The speeds that a row has, with the engines as shipped. Raises what ``predict`` raises."""
    predicted, explained = predict(row), []
    if predicted.decode is not None and row.decode_tokens_per_s is not None:
        explained.append(Explanation("decode", 1, _sorted(_of_token(row, predicted.decode)), row.decode_tokens_per_s))
    if predicted.prompt is not None and row.prompt_tokens and row.prompt_tokens_per_s is not None:
        parts = _sorted(_of_prompt(row, predicted.prompt, row.prompt_tokens))
        explained.append(Explanation("prompts", row.prompt_tokens, parts, row.prompt_tokens_per_s))
    return explained


def _sorted(parts: Sequence[TimePart]) -> list[TimePart]:
    return sorted((part for part in parts if part.ns), key=lambda part: -part.ns)


def _of_token(row: MeasuredRow, time: DecodeTime) -> list[TimePart]:
    shape, hardware, split = shape_of(row), machine_of(row.machine), split_of(row)
    read, others = token_bytes(shape, hardware, split, context_of(row)), shape.product_bytes
    return [
        TimePart("attention", time.attention_ns, shape.moe_layers, "us a layer"),
        TimePart(OTHERS, time.others_ns, others - _attention_bytes(shape), "GB/s"),
        TimePart(_experts(row), time.gpu_experts_ns, read.gpu_weights - others, "GB/s"),
        TimePart(CPU_EXPERTS, time.cpu_experts_ns, read.cpu_weights, "GB/s"),
        TimePart(
            "handing over to the CPU", time.handing_over_ns, min(split.cpu_layers, shape.moe_layers), "us a layer"
        ),
    ]


def _of_prompt(row: MeasuredRow, time: PromptTime, tokens: int) -> list[TimePart]:
    shape, split, hardware = shape_of(row), split_of(row), machine_of(row.machine)
    layer_flops = 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width * shape.top_k * tokens
    away = min(split.cpu_layers, shape.moe_layers) * (1 - split.gpu_experts / shape.experts)
    on_cpu = away * layer_flops if time.cpu_experts_ns else 0.0
    rate = copy_bytes_per_s(hardware, load_fitted(row.engine).prompt)
    return [
        TimePart("attention", time.attention_ns, tokens, "us a token"),
        TimePart(OTHERS, time.others_ns, tokens, "us a token"),
        TimePart(_experts(row), time.gpu_experts_ns, shape.moe_layers * layer_flops - on_cpu, "TFLOP/s"),
        TimePart(CPU_EXPERTS, time.cpu_experts_ns, on_cpu, "TFLOP/s"),
        TimePart("copies of experts to the GPU", time.copies_ns, rate * time.copies_ns / NS, "GB/s"),
    ]


def _experts(row: MeasuredRow) -> str:
    """The experts that are computed where attention is."""
    return CPU_EXPERTS if machine_of(row.machine).cpu_only else "experts on the GPU"


def _attention_bytes(shape: ModelShape) -> float:
    """Weights of attention in the mixture's layers; the time of dense layers is with the others."""
    return shape.mean_of_layers(lambda kind: kind.params * shape.bits.of_attention(kind)) / 8 * shape.moe_layers
