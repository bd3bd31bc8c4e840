"""Tables of which a token reads a few rows, such as those of n-grams: bytes that no product multiplies, which are no
part of a model's shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from traces.models.catalogue import architecture_of
from traces.models.names import parted
from traces.models.quantisation import quantisation_files
from traces.models.shape import ModelShape, ShapeError
from trilane.common.hints import Count, above
from trilane.common.yaml_files import read_bundled

_FILE = Path(__file__).with_name("row_tables.yaml")
Files = Literal["gguf", "safetensors"]


class RowTable(NamedTuple):
    """A table, as a model's file has it."""

    name: str
    size_bytes: int
    rows_per_token: int
    row_bytes: float


class _RowTables(NamedTuple):
    """The table of an architecture; ``row_tables.yaml`` says what its numbers mean."""

    name: str
    rows: Count
    width: Count
    rows_per_token: Count
    bits: Mapping[Files, Annotated[float, above(0)]]
    sources: Mapping[str, str]


def row_table(shape: ModelShape) -> RowTable | None:
    """The table of a model with its weights; None for one without."""
    name = parted(shape.name)
    kind = _kinds().get(architecture_of(shape) or "")
    if kind is None:
        return None
    files: Files = "safetensors" if name.weights and "safetensors" in quantisation_files(name.weights) else "gguf"
    row_bytes = kind.width * kind.bits[files] / 8
    return RowTable(kind.name, round(kind.rows * row_bytes), kind.rows_per_token, row_bytes)


@cache
def _kinds() -> Mapping[str, _RowTables]:
    """Tables by the architecture. Raises ShapeError for a faulty file."""
    known: Mapping[str, _RowTables] = read_bundled(Mapping[str, _RowTables], _FILE, ShapeError)
    return known
