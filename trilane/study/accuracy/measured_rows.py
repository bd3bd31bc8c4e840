"""Speeds that other people measured, one row each: ``measured_speeds.csv`` and files of the same form."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from trilane.common.errors import TrilaneError
from trilane.common.hints import Count, Name, above, at_least, at_most, between
from trilane.common.quoting import quoted
from trilane.common.schema import from_dict

BUNDLED = Path(__file__).with_name("measured_speeds.csv")
_MOST_BYTES = 16 * 2**20
_MOST_PIECES = 4096  # each is predicted
_Speed = Annotated[float, between(1e-6, 1e9)]
_Tokens = Annotated[int, at_least(0), at_most(2**31)]


class RowsError(TrilaneError):
    """A file of measured speeds that cannot be read; the message says which row and column."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One measurement. ``model``, ``machine`` and ``engine`` are names or files as ``fit`` takes them.

    ``cpu_layers``: MoE layers whose experts the CPU computes, of which the GPU has ``gpu_experts`` each.
    ``depth_tokens`` are in the KV cache before the first token that was timed; ``prompt_depth_tokens`` before the
    prompt. ``quality``: A, the setting is fully stated; B, one thing is ``assumed``; C, for a sanity check.
    ``left_out``: why it is not asked.
    """

    id: Name
    model: Name
    machine: Name
    engine: Name
    cpu_layers: _Tokens
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
        if self.prompt_tokens and self.piece_tokens and self.prompt_tokens > _MOST_PIECES * self.piece_tokens:
            raise RowsError(f"piece_tokens: expected at most {_MOST_PIECES:,} pieces of the prompt")

    @property
    def shape_name(self) -> str:
        """The model in its weights, as ``load_model`` takes it."""
        return self.model if self.weights in ("", "bf16") else f"{self.model}@{self.weights}"


_KINDS: dict[str, type] = {
    "threads": int, "cpu_layers": int, "gpu_experts": int, "depth_tokens": int, "generated_tokens": int,
    "prompt_tokens": int, "prompt_depth_tokens": int, "piece_tokens": int, "kv_bits": float,
    "decode_tokens_per_s": float, "prompt_tokens_per_s": float,
}  # fmt: skip
_NAMES = tuple(field.name for field in fields(MeasuredRow))


def read_rows(path: str | Path = BUNDLED) -> list[MeasuredRow]:
    """The rows of a CSV file; columns that are not known are passed over. Raises RowsError."""
    where = Path(path)
    try:
        if where.stat().st_size > _MOST_BYTES:
            raise RowsError(f"{path}: expected at most {_MOST_BYTES:,} bytes")
        with where.open(encoding="utf-8", newline="") as file:
            return list(_rows(csv.DictReader(file, strict=True), str(path)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowsError(f"{path}: expected a CSV file of measured speeds: {error}") from None


def _rows(lines: csv.DictReader[str], path: str) -> Iterable[MeasuredRow]:
    missing = {"id", "model", "machine", "engine", "cpu_layers"} - set(lines.fieldnames or ())
    if missing:
        raise RowsError(f"{path}: expected the columns {', '.join(sorted(missing))}, too")
    for number, line in enumerate(lines, start=2):
        where = f"{path}, line {number}"
        given = {name: text for name in _NAMES if (text := line.get(name)) not in (None, "")}
        if "left_out" in given:
            given.setdefault("cpu_layers", "0")
        values = {name: _value(name, str(text), where) for name, text in given.items()}
        yield from_dict(MeasuredRow, values, where, RowsError)


def _value(name: str, text: str, where: str) -> Any:
    """A cell. Raises RowsError for text where a number belongs."""
    if name == "repacked":
        if text not in ("yes", "no"):
            raise RowsError(f"{where}, {name}: expected yes or no, got {quoted(text)}")
        return text == "yes"
    kind = _KINDS.get(name, str)
    try:
        return kind(text)
    except ValueError:
        word = "a whole number" if kind is int else "a number"
        raise RowsError(f"{where}, {name}: expected {word}, got {quoted(text)}") from None
