"""Speeds that other people measured, a row each: ``measured_speeds.csv``, files of its form, and one to fill in."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from trilane.common.csv_files import read_csv, write_csv
from trilane.common.errors import TrilaneError
from trilane.common.hints import Count, Name, above, at_least, at_most, between

BUNDLED = Path(__file__).with_name("measured_speeds.csv")
EXAMPLE = "177"  # of a template: experts of some layers on the CPU, decode and prompt speed
_MOST_PIECES = 4096  # each is predicted
_Speed = Annotated[float, between(1e-6, 1e9)]
_Tokens = Annotated[int, at_least(0), at_most(2**31)]


class RowsError(TrilaneError):
    """A file of measured speeds that cannot be read; the message says which row and column."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One measurement. ``model``, ``machine`` and ``engine`` are names or files as ``fit`` takes them.

    ``cpu_layers``: MoE layers whose experts the CPU computes, of which the GPU has ``gpu_experts`` each; None only
    where the row is left out.
    ``depth_tokens`` are in the KV cache before the first token that was timed; ``prompt_depth_tokens`` before the
    prompt. ``quality``: A, the setting is fully stated; B, one thing is ``assumed``; C, for a sanity check.
    ``left_out``: why it is not asked.
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
    depth_tokens: _Tokens = 0
    generated_tokens: _Tokens = 64
    decode_tokens_per_s: _Speed | None = None
    prompt_tokens: Annotated[int, at_least(1), at_most(2**21)] | None = None
    prompt_depth_tokens: _Tokens = 0
    piece_tokens: Count | None = None
    prompt_tokens_per_s: _Speed | None = None
    quality: Name = ""
    left_out: Name = ""
    source: str = ""
    date: Name = ""
    setting: str = ""
    assumed: str = ""

    def __post_init__(self) -> None:
        if self.cpu_layers is None and not self.left_out:
            raise RowsError("cpu_layers: expected a number of layers, got none")
        if self.prompt_tokens and self.piece_tokens and self.prompt_tokens > _MOST_PIECES * self.piece_tokens:
            raise RowsError(f"piece_tokens: expected at most {_MOST_PIECES:,} pieces of the prompt")

    @property
    def shape_name(self) -> str:
        """The model in its weights, as ``load_model`` takes it."""
        return self.model if self.weights in ("", "bf16") else f"{self.model}@{self.weights}"


def read_rows(path: str | Path = BUNDLED) -> list[MeasuredRow]:
    """The rows of a CSV file; columns that are not known are passed over. Raises RowsError."""
    return read_csv(MeasuredRow, path, "a CSV file of measured speeds", RowsError)


COLUMNS = tuple(field.name for field in fields(MeasuredRow) if field.name != "left_out")


def write_template(path: str | Path) -> None:
    """A file for measured speeds of one's own: all columns, and a bundled row as an example. Raises OSError."""
    example = next(row for row in read_rows() if row.id == EXAMPLE)
    cells = ("example", *(_cell(getattr(example, name)) for name in COLUMNS[1:]))
    write_csv([COLUMNS, cells], path)


def _cell(value: object) -> object:
    """A value as ``read_rows`` takes it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
