"""Header of a GGUF file: metadata and the table of tensors. The weights are not read.

Nothing is allocated by a number of the file alone: counts, lengths and the size of the whole header have limits, and
what does not matter here, such as the vocabulary, is passed over. Format: ggml-org/ggml docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from traces.models.shape import ShapeError
from trilane.common.hints import Count, above
from trilane.common.quoting import quoted
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml

Value = int | float | bool | str | tuple[int | float | bool, ...]

_TYPES = Path(__file__).with_name("gguf_types.yaml")
_MOST_BYTES = 2**27  # of a header; that of a vocabulary of 250,000 has 12 MB
_MOST_KEYS, _MOST_TENSORS, _MOST_DIMENSIONS = 10_000, 200_000, 4
_MOST_TEXT, _MOST_KEPT = 2**20, 4096  # bytes of a text; entries of a list that is kept
_MOST_ELEMENTS = 2**45  # of a tensor
_MOST_PARTS = 1000
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


class TensorType(NamedTuple):
    """How weights are stored: bytes of a block, and its weights."""

    name: str
    size_bytes: Annotated[float, above(0)]
    weights: Count = 1


@dataclass(frozen=True)
class Tensor:
    """An entry of the table; ``shape`` begins with the length of a row."""

    name: str
    shape: tuple[int, ...]
    type: TensorType

    @property
    def elements(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return int(self.elements * self.type.size_bytes / self.type.weights)


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, without long lists, and all tensors, of every part of a file that is split."""

    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of ``path``; of a file in parts, that of the first with the tensors of all.

    Raises ShapeError naming the file for what is no GGUF file, is damaged, or has a part that is missing.
    """
    first, *others = [_read_part(part) for part in _parts(path)]
    tensors = [tensor for header in (first, *others) for tensor in header.tensors]
    if len(tensors) > _MOST_TENSORS:
        raise ShapeError(f"{path}: expected at most {_MOST_TENSORS:,} tensors in all parts, got {len(tensors):,}")
    return GgufHeader(first.metadata, tuple(tensors))


def _parts(path: Path) -> list[Path]:
    """All files of a model that is split, in order."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= count <= _MOST_PARTS:
        raise ShapeError(f"{path}: expected a file in 1 to {_MOST_PARTS} parts, its name says {count}")
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ShapeError(f"{path}: expected all {count} parts next to each other, {missing[0]} is missing")
    return parts


def _read_part(path: Path) -> GgufHeader:
    with path.open("rb") as file:
        if not file.read(1):
            raise ShapeError(f"{path}: expected a GGUF file, this is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()


class _Reader:
    """Reads a header from its beginning to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> GgufHeader:
        magic, version = self._bytes(4), self._number("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise self._fault("expected a GGUF file of version 2 or 3, little-endian, this begins otherwise")
        tensors, keys = self._count("tensors", _MOST_TENSORS), self._count("keys", _MOST_KEYS)
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            key = self._text("a key")
            value = self._value(self._number("I"), key)
            if value is not None:
                metadata[key] = value
        return GgufHeader(metadata, tuple(self._tensor() for _ in range(tensors)))

    def _tensor(self) -> Tensor:
        name, dimensions = self._text("a tensor's name"), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._fault(f"tensor {quoted(name)}: expected 1 to {_MOST_DIMENSIONS} dimensions, got {dimensions}")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        number, _ = self._number("I"), self._number("Q")
        if not 1 <= prod(shape) <= _MOST_ELEMENTS:
            raise self._fault(f"tensor {quoted(name)}: expected 1 to {_MOST_ELEMENTS:,} elements, got {list(shape)}")
        if number not in tensor_types():
            raise self._fault(f"tensor {quoted(name)} has type {number}, whose size is not known; see {_TYPES.name}")
        return Tensor(name, shape, tensor_types()[number])

    def _value(self, kind: int, key: str) -> Value | None:
        """A value; None for a list that is not kept."""
        if kind == _TEXT:
            return self._text(f"the text at {quoted(key)}")
        if kind in _SCALARS:
            return self._scalar(kind)
        if kind != _LIST:
            raise self._fault(f"{quoted(key)}: expected a type of value from 0 to 12, got {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner == _TEXT:
            self._pass_texts(count)
            return None
        if inner not in _SCALARS:
            raise self._fault(f"{quoted(key)}: expected a list of numbers or texts, got one of type {inner}")
        if count > _MOST_KEPT:
            self._advance(count * struct.calcsize(_SCALARS[inner]))
            return None
        return tuple(self._scalar(inner) for _ in range(count))

    def _pass_texts(self, count: int) -> None:
        """Past a list of texts: at least eight bytes each, so that the header's limit ends it."""
        data, at, end = self._data, self._at, min(len(self._data), _MOST_BYTES) - 8
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > end:
                raise self._ends()
            at += 8 + length(data, at)[0]
        self._advance(at - self._at)

    def _text(self, what: str) -> str:
        length = self._number("Q")
        if length > _MOST_TEXT:
            raise self._fault(f"expected {what} of at most {_MOST_TEXT:,} bytes, got {length:,}")
        return self._bytes(length).decode("utf-8", "replace")

    def _count(self, what: str, most: int) -> int:
        count = int(self._number("Q"))
        if count > most:
            raise self._fault(f"expected at most {most:,} {what}, got {count:,}")
        return count

    def _scalar(self, kind: int) -> int | float | bool:
        found: int | float | bool = self._number(_SCALARS[kind])
        return found

    def _number(self, code: str) -> Any:
        """A number of a type of ``struct``."""
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _bytes(self, length: int) -> bytes:
        begin = self._at
        self._advance(length)
        return self._data[begin : self._at]

    def _advance(self, length: int) -> None:
        self._at += length
        if self._at > min(len(self._data), _MOST_BYTES):
            raise self._ends()

    def _ends(self) -> ShapeError:
        if len(self._data) > _MOST_BYTES:
            return self._fault(f"expected a header of at most {_MOST_BYTES:,} bytes, got more")
        return self._fault("the file ends within its header; copy or download it again")

    def _fault(self, problem: str) -> ShapeError:
        return ShapeError(f"{self._path}: {problem}")


@cache
def tensor_types() -> Mapping[int, TensorType]:
    """Types of tensors by their number."""
    known: Mapping[int, TensorType] = from_dict(Mapping[int, TensorType], read_yaml(_TYPES), _TYPES.name, ShapeError)
    return known
