"""Predictions of measured rows: the speeds of a split on the row's own machine, with its own engine and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from sim.costs.engine import FittedEngine, load_fitted
from sim.machine.hardware import Hardware, load_hardware
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from trilane.engines.accuracy.measured_rows import MeasuredRow, RowsError
from trilane.engines.split_speed import DecodeTime, PromptTime, StaticSplit, decode_time, prompt_time

NS = 1e9


@dataclass(frozen=True)
class Prediction:
    """What a row's setting should give; None where the row has no such speed."""

    decode: DecodeTime | None
    prompt: PromptTime | None
    prompt_tokens: int | None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second of one sequence."""
        return None if self.decode is None else NS / self.decode.total_ns

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Prompt tokens a second."""
        return None if self.prompt is None or not self.prompt_tokens else NS * self.prompt_tokens / self.prompt.total_ns


def predict(row: MeasuredRow, engines: Mapping[str, FittedEngine] | None = None) -> Prediction:
    """The row's speeds. ``engines``: in place of those that come with the simulator.

    Raises RowsError for more experts on the GPU than there are, and what ``load_model``, ``load_hardware`` and
    ``load_fitted`` raise.
    """
    shape, hardware = shape_of(row), machine_of(row.machine)
    if row.gpu_experts > shape.experts:
        raise RowsError(f"gpu_experts: expected at most {shape.experts}, the model's own, got {row.gpu_experts}")
    engine = (engines or {}).get(row.engine) or load_fitted(row.engine)
    split = split_of(row)
    decode = prompt = None
    if row.decode_tokens_per_s is not None:
        decode = decode_time(shape, hardware, engine, split, context_of(row))
    if row.prompt_tokens_per_s is not None and row.prompt_tokens is not None:
        prompt = prompt_time(shape, hardware, engine, split, row.prompt_tokens, row.prompt_depth_tokens)
    return Prediction(decode, prompt, row.prompt_tokens)


def split_of(row: MeasuredRow) -> StaticSplit:
    return StaticSplit(row.cpu_layers or 0, row.gpu_experts, row.threads, row.piece_tokens, row.repacked)


def context_of(row: MeasuredRow) -> int:
    """Tokens in the KV cache while it decodes: half of the answer, in the mean."""
    return row.depth_tokens + max(row.generated_tokens // 2, 1)


@cache
def shape_of(row: MeasuredRow) -> ModelShape:
    """The row's model in its weights, with its KV cache."""
    shape = load_model(row.shape_name)
    return shape if row.kv_bits is None else replace(shape, kv_bits=row.kv_bits)


@cache
def machine_of(name: str) -> Hardware:
    """A machine, read once."""
    return load_hardware(name)
