"""Speeds that other people measured, a row each, and predictions of them.

Rows are in ``measured_speeds.csv``, files of its form, and one to fill in. A row is predicted by the speeds of its
split on its own machine, with its own engine and lengths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from sim.costs.engine import FittedEngine, NumaMode, load_fitted
from sim.costs.kernel_costs import Copies
from sim.costs.software import SplitMode
from sim.machine.cards import load_machine
from sim.machine.hardware import Hardware
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from trilane.common.csv_files import read_csv, write_csv
from trilane.common.errors import TrilaneError
from trilane.common.hints import Count, Name, above, at_least, at_most, between
from trilane.common.quoting import quoted
from trilane.engines.layer_split import blocks_of
from trilane.engines.parallel import together
from trilane.engines.split_modes import PROPORTIONS
from trilane.engines.split_speed import DecodeTime, PromptTime, StaticSplit, decode_time, prompt_time

BUNDLED = Path(__file__).with_name("measured_speeds.csv")
EXAMPLE = "177"  # of a template: experts of some layers on the CPU, decode and prompt speed
SCORED_QUALITIES = ("", "A", "B")  # C is shown apart
_MOST_PIECES = 4096  # each is predicted
_Speed = Annotated[float, between(1e-6, 1e9)]
_Tokens = Annotated[int, at_least(0), at_most(2**31)]
NS = 1e9


class RowsError(TrilaneError):
    """A file of measured speeds that cannot be read; the message says which row and column."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One measurement. ``model``, ``machine`` and ``engine`` are names or files as ``fit`` takes them.

    ``cpu_layers``: MoE layers whose experts the CPU computes, of which the GPU has ``gpu_experts`` each; None only
    where the row is left out.
    ``depth_tokens`` are in the KV cache before the first token that was timed; ``prompt_depth_tokens`` before the
    prompt. ``copies``: host memory from which experts are copied, where the row states it; None, as the engine does by
    itself. ``numa``: the mode of ``--numa``. ``quality``: A, the setting is fully stated; B, one thing is ``assumed``;
    C, for a sanity check. ``left_out``: why it is not asked. ``fault``: why it is asked, but counts in no score and no
    fit. ``put_in``: its speeds of which the same is true, since a number of its engine that is not fitted was taken
    from them. ``ts``: layers of each of several GPUs, the quickest first, as -ts counts them: 25,24; or
    proportions, where each has a part of every layer, by the mode that ``sm`` names. ``disk``: the kind from which
    experts were read that ``ram_gb`` GiB of memory had no room for (``trilane.engines.accuracy.apart``).
    """

    id: Name
    model: Name
    machine: Name
    engine: Name
    cpu_layers: _Tokens | None
    weights: Name = ""
    threads: Count | None = None
    gpu_experts: _Tokens = 0
    repacked: bool = False
    kv_bits: Annotated[float, above(0), at_most(64)] | None = None
    copies: Copies | None = None
    numa: NumaMode | None = None
    ts: Name = ""
    sm: SplitMode = "layer"
    ram_gb: Count | None = None
    disk: Name = ""
    depth_tokens: _Tokens = 0
    generated_tokens: _Tokens = 64
    decode_tokens_per_s: _Speed | None = None
    prompt_tokens: Annotated[int, at_least(1), at_most(2**21)] | None = None
    prompt_depth_tokens: _Tokens = 0
    piece_tokens: Count | None = None
    prompt_tokens_per_s: _Speed | None = None
    quality: Name = ""
    left_out: Name = ""
    fault: Name = ""
    put_in: Literal["", "decode", "prompts", "both"] = ""
    source: str = ""
    date: Name = ""
    setting: str = ""
    assumed: str = ""

    def __post_init__(self) -> None:
        if self.cpu_layers is None and not self.left_out:
            raise RowsError("cpu_layers: expected a number of layers, got none")
        if self.disk and self.ram_gb is None:
            raise RowsError(f"ram_gb: expected the GiB of memory above the disk {quoted(self.disk)}, got none")
        if not re.fullmatch(r"(\d{1,4}(,\d{1,4})+)?", self.ts):
            raise RowsError(f"ts: expected numbers of layers, such as 25,24, got {quoted(self.ts)}")
        if self.prompt_tokens and self.piece_tokens and self.prompt_tokens > _MOST_PIECES * self.piece_tokens:
            raise RowsError(f"piece_tokens: expected at most {_MOST_PIECES:,} pieces of the prompt")

    @property
    def scored(self) -> bool:
        """True if it counts in scores and fits."""
        return not self.left_out and not self.fault and self.quality in SCORED_QUALITIES

    def sets(self, quantity: Literal["decode", "prompts"]) -> bool:
        """True if its speed of this kind is put in."""
        return self.put_in in (quantity, "both")

    @property
    def shape_name(self) -> str:
        """The model in its weights, as ``load_model`` takes it."""
        return self.model if self.weights in ("", "bf16") else f"{self.model}@{self.weights}"


def read_rows(path: str | Path = BUNDLED) -> list[MeasuredRow]:
    """The rows of a CSV file; columns that are not known are passed over. Raises RowsError."""
    return read_csv(MeasuredRow, path, "a CSV file of measured speeds", RowsError)


COLUMNS = tuple(field.name for field in fields(MeasuredRow) if field.name not in ("left_out", "fault", "put_in"))


def write_template(path: str | Path) -> None:
    """A file for measured speeds of one's own: all columns, and a bundled row as an example. Raises OSError."""
    example = next(row for row in read_rows() if row.id == EXAMPLE)
    cells = ("example", *(_cell(getattr(example, name)) for name in COLUMNS[1:]))
    write_csv([COLUMNS, cells], path)


def _cell(value: object) -> object:
    """A value as ``read_rows`` takes it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a row's setting; None where the row has no such speed."""

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

    Raises RowsError for more layers or experts than the model has, and what ``load_model``, ``load_hardware`` and
    ``load_fitted`` raise.
    """
    shape = shape_of(row)
    for key, own in (("cpu_layers", shape.moe_layers), ("gpu_experts", shape.experts)):
        if (getattr(row, key) or 0) > own:
            raise RowsError(f"row {row.id}: {key}: expected at most {own}, the model's own, got {getattr(row, key)}")
    hardware = machine_of(row.machine)
    by_card, layers = _by_card(row), blocks_of(shape) + 1
    whole = row.sm in PROPORTIONS or sum(by_card or (layers,)) == layers
    engine = ((engines or {}).get(row.engine) or load_fitted(row.engine)).copying_from(row.copies)
    apart = len(by_card or (layers,)) != len(hardware.cards) and not together(engine, hardware)
    if apart or not whole:
        raise RowsError(f"row {row.id}: ts: expected {layers} layers on {len(hardware.cards)} GPUs")
    return predict_on(row, hardware, engine)


def predict_on(row: MeasuredRow, hardware: Hardware, engine: FittedEngine) -> Prediction:
    """The speeds of a row's setting on another machine, or in another engine. Raises what ``fitted_costs`` raises."""
    shape, split = shape_of(row), split_of(row)
    if split.mode not in engine.split_modes:  # builds without it divide layers
        split = replace(split, mode="layer")
    decode = prompt = None
    if row.decode_tokens_per_s is not None:
        decode = decode_time(shape, hardware, engine, split, context_of(row))
    if row.prompt_tokens_per_s is not None and row.prompt_tokens is not None:
        prompt = prompt_time(shape, hardware, engine, split, row.prompt_tokens, row.prompt_depth_tokens)
    return Prediction(decode, prompt, row.prompt_tokens)


def split_of(row: MeasuredRow) -> StaticSplit:
    return StaticSplit(
        row.cpu_layers or 0, row.gpu_experts, row.threads, row.piece_tokens, row.repacked, numa=row.numa,
        by_card=_by_card(row), mode=row.sm,
    )


def _by_card(row: MeasuredRow) -> tuple[int, ...] | None:
    return tuple(map(int, row.ts.split(","))) if row.ts else None


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
    return load_machine(name)
