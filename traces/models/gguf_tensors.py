"""Tensors of GGUF files: their types, with the bytes of a block, and their places in the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

from traces.models.shape import ShapeError
from trilane.common.hints import Count, above
from trilane.common.yaml_files import read_bundled

TYPES_FILE = Path(__file__).with_name("gguf_types.yaml")


class TensorType(NamedTuple):
    """How weights are stored: bytes of a block, and its weights."""

    name: str
    size_bytes: Annotated[float, above(0)]
    weights: Count = 1


@dataclass(frozen=True)
class Tensor:
    """An entry of the table of tensors; ``shape`` begins with the length of a row."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    type_number: int  # ggml_type
    file: Path  # that of the part that holds it
    begin: int  # of its first byte in this file

    @property
    def elements(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return int(self.elements * self.type.size_bytes / self.type.weights)

    @property
    def end(self) -> int:
        """The place in the file after its last byte."""
        return self.begin + self.size_bytes


@cache
def tensor_types() -> Mapping[int, TensorType]:
    """Types of tensors by their number."""
    known: Mapping[int, TensorType] = read_bundled(Mapping[int, TensorType], TYPES_FILE, ShapeError)
    return known
