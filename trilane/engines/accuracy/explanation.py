"""One measured row explained: the parts of the predicted time, and what the longest would have to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sim.costs.engine import load_fitted
from sim.costs.fitted_costs import copy_bytes_per_s
from traces.models.shape import ModelShape
from trilane.engines.accuracy.errors import Quantity
from trilane.engines.accuracy.measured_rows import MeasuredRow, context_of, machine_of, predict, shape_of, split_of
from trilane.engines.accuracy.scores import token_bytes, weights_of_others
from trilane.engines.split_speed import DecodeTime, PromptTime

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
    read, others = token_bytes(shape, hardware, split, context_of(row)), weights_of_others(shape)
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
    params = sum(kind.params * layers for kind, layers in shape.attention_counts)
    return params * shape.dense_bits / 8 * shape.moe_layers / shape.layers
