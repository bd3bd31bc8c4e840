"""Reader of the headers of GGUF files: metadata by key, checked, and the table of tensors; weights are not read.

Nothing is allocated by a number of a file alone: counts, lengths and the size of a whole header have limits, and what
does not matter here, such as the vocabulary, is passed over. What llama.cpp refuses (ggml/src/gguf.cpp) is refused too:
keys and tensors that are there twice, rows that are no whole number of blocks, an alignment that is no power of two,
tensors that overlap or end after the file. Format: ggml-org/ggml docs/gguf.md, versions 2 and 3.

A split file has parts named ``NAME-00001-of-00003.gguf``, each with a header of its own; the keys ``split.no``,
``split.count`` and ``split.tensors.count`` say which it is (ggml-org/llama.cpp tools/gguf-split). Other keys begin with
the architecture, such as qwen3moe.expert_count.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from traces.models.shape import ShapeError
from trilane.common.hints import Count, above
from trilane.common.quoting import quoted
from trilane.common.yaml_files import read_bundled

TYPES_FILE = Path(__file__).with_name("gguf_types.yaml")
Value = int | float | bool | str | tuple[int | float | bool, ...]
MOST_TENSORS = 200_000
_MAGIC = b"GGUF"
_MOST_BYTES = 2**27  # of a header; that of a vocabulary of 250,000 has 12 MB
_MOST_KEYS, _MOST_DIMENSIONS = 10_000, 4
_MOST_TEXT, _MOST_KEPT = 2**20, 4096  # bytes of a text; entries of a list that is kept
_MOST_VALUES = 2**18  # entries of all lists that are kept; ten lists of 1,000 layers have 10,000
_MOST_ELEMENTS = 2**45  # of a tensor
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_ALIGNMENT, _USUAL_ALIGNMENT, _MOST_ALIGNMENT = "general.alignment", 32, 2**20
_MOST_PARTS = 1000
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_PART_NUMBER, _PART_COUNT, _TENSOR_COUNT = "split.no", "split.count", "split.tensors.count"
_MOST_COUNT = 10**9
_MOST_LAYERS = 1000


class TensorType(NamedTuple):
    """A storage type: bytes of a block, and its weights."""

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


class GgufPart(NamedTuple):
    """One file: its metadata by key, without long lists, and its tensors."""

    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]


def read_gguf_part(path: Path) -> GgufPart:
    """The header of one file. Raises ShapeError naming the file and the fault."""
    with path.open("rb") as file:
        if not file.read(1):
            raise ShapeError(f"{path}: expected a GGUF file, this is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).part()


class _Reader:
    """A place in a file, from which values are read one after the other."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0
        self._kept = 0  # entries of lists

    def part(self) -> GgufPart:
        beginning = self._data[: len(_MAGIC)]
        if not _MAGIC.startswith(beginning):
            begins = quoted(beginning.decode("latin-1"))
            raise self._fault(f"this is not a GGUF file: it begins with {begins}, expected {_MAGIC.decode()!r}")
        self._advance(len(_MAGIC))
        version = self._number("I")
        if version not in (2, 3):
            raise self._fault("expected a GGUF file of version 2 or 3, little-endian, this is of another")
        tensors, keys = self._count("tensors", MOST_TENSORS), self._count("keys", _MOST_KEYS)
        metadata = self._metadata(keys)
        table = [self._tensor() for _ in range(tensors)]
        return GgufPart(metadata, self._placed(table, self._alignment(metadata)))

    def _metadata(self, count: int) -> dict[str, Value]:
        seen: set[str] = set()
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self._text("a key")
            if key in seen:
                raise self._fault(f"expected every key once, {quoted(key)} is there twice")
            seen.add(key)
            value = self._value(self._number("I"), key)
            if value is not None:
                metadata[key] = value
        return metadata

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        """Alignment of the tensors in the file, in bytes."""
        alignment = metadata.get(_ALIGNMENT, _USUAL_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
            raise self._fault(
                f"{_ALIGNMENT}: expected a power of two up to {_MOST_ALIGNMENT:,}, got {quoted(alignment)}"
            )
        return alignment

    def _tensor(self) -> Tensor:
        """An entry of the table, whose ``begin`` is relative to the first tensor."""
        name, dimensions = self._text("a tensor's name"), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._fault(f"tensor {quoted(name)}: expected 1 to {_MOST_DIMENSIONS} dimensions, got {dimensions}")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        number, begin = self._number("I"), self._number("Q")
        if not 1 <= prod(shape) <= _MOST_ELEMENTS:
            raise self._fault(f"tensor {quoted(name)}: expected 1 to {_MOST_ELEMENTS:,} elements, got {list(shape)}")
        if number not in tensor_types():
            raise self._fault(
                f"tensor {quoted(name)} has type {number}, whose size is not known; see {TYPES_FILE.name}"
            )
        kind = tensor_types()[number]
        if shape[0] % kind.weights:
            raise self._fault(
                f"tensor {quoted(name)}: expected rows of whole blocks of {kind.weights} weights, as {kind.name} has "
                f"them, got {shape[0]:,} weights a row"
            )
        return Tensor(name, shape, kind, number, self._path, begin)

    def _placed(self, table: list[Tensor], alignment: int) -> tuple[Tensor, ...]:
        """The tensors at their places in the file, none of which overlaps another or ends after the file."""
        first, before = -(-self._at // alignment) * alignment, 0
        placed = []
        for tensor in table:
            if tensor.begin % alignment or tensor.begin < before:
                raise self._fault(
                    f"tensor {quoted(tensor.name)}: expected it at a multiple of {alignment} from {before:,} on, after "
                    f"the tensor before, got {tensor.begin:,}"
                )
            before = tensor.end
            placed.append(replace(tensor, begin=first + tensor.begin))
        if placed and placed[-1].end > len(self._data):
            raise self._fault(
                f"the file ends at byte {len(self._data):,}, within its weights, which take {placed[-1].end:,}; copy "
                f"or download it again"
            )
        return tuple(placed)

    def _value(self, kind: int, key: str) -> Value | None:
        """A value; None for a list that is not kept."""
        if kind == _TEXT:
            return self._text(f"the text at {quoted(key)}")
        if kind in _SCALARS:
            number: Value = self._number(_SCALARS[kind])
            return number
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
        return self._list(_SCALARS[inner], count)

    def _list(self, code: str, count: int) -> tuple[int | float | bool, ...]:
        """A list that is kept."""
        self._kept += count
        if self._kept > _MOST_VALUES:
            raise self._fault(f"expected at most {_MOST_VALUES:,} numbers in lists of up to {_MOST_KEPT:,}, got more")
        form = f"<{count}{code}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _pass_texts(self, count: int) -> None:
        """Skip a list of texts, of at least eight bytes each, so that the header's limit ends it."""
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


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, without long lists, and all tensors, of every part of a file that is split."""

    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    files: tuple[Path, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of ``path``; of a file in parts, that of the first with the tensors of all.

    Raises ShapeError naming the file for what is no GGUF file, is damaged, or has a part that is missing.
    """
    files = _parts(path)
    parts = [read_gguf_part(file) for file in files]
    for number, part in enumerate(parts):
        _check_part(files[number], part, number, len(parts))
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    _check_tensors(path, tensors, parts[0].metadata.get(_TENSOR_COUNT, len(tensors)))
    return GgufHeader(parts[0].metadata, tensors, tuple(files))


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


def _check_part(file: Path, part: GgufPart, number: int, count: int) -> None:
    """Check that the keys of a part say what its name says. Raises ShapeError."""
    said = part.metadata.get(_PART_NUMBER, number), part.metadata.get(_PART_COUNT, count) or 1
    if said != (number, count):
        raise ShapeError(
            f"{file}: expected part {number + 1} of {count}, as the name says, its keys {_PART_NUMBER} and "
            f"{_PART_COUNT} say {quoted(said[0])}, counted from 0, of {quoted(said[1])}; name the parts "
            "NAME-00001-of-0000N.gguf"
        )


def _check_tensors(path: Path, tensors: tuple[Tensor, ...], count: Value) -> None:
    """Check that there are as many tensors as the first part says, each once. Raises ShapeError."""
    if len(tensors) > MOST_TENSORS:
        raise ShapeError(f"{path}: expected at most {MOST_TENSORS:,} tensors in all parts, got {len(tensors):,}")
    if len(tensors) != count:
        raise ShapeError(f"{path}: expected {quoted(count)} tensors, as {_TENSOR_COUNT} says, got {len(tensors):,}")
    name, times = next(iter(Counter(tensor.name for tensor in tensors).most_common(1)), ("", 1))
    if times > 1:
        raise ShapeError(f"{path}: expected every tensor once, {quoted(name)} is there {times} times")


@dataclass(frozen=True)
class GgufKeys:
    """The keys of one model; ``where``, its file, begins every message."""

    metadata: Mapping[str, Value]
    where: str

    @property
    def architecture(self) -> str:
        """The architecture, as llama.cpp names it."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def layers(self) -> int:
        """Layers, without those that predict several tokens at once."""
        count = self.count("block_count") - self.count("nextn_predict_layers", default=0)
        if not 1 <= count <= _MOST_LAYERS:
            raise ShapeError(f"{self.where}: block_count: expected 1 to {_MOST_LAYERS} layers, got {count:,}")
        return count

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    def count(self, key: str, layer: int = 0, default: int | None = None, least: int = 0) -> int:
        """The whole number at ``key``; of a list, that of ``layer``. Raises ShapeError for another value, or none."""
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if isinstance(value, tuple):
            value = value[layer] if layer < len(value) else None
        if type(value) is not int or not least <= value <= _MOST_COUNT:
            raise ShapeError(
                f"{self.where}: expected a whole number from {least} at the key {quoted(name)}, got {quoted(value)}; "
                f"this is no model with experts, or of a family that is not known: give its config.json instead"
            )
        return value

    def flag(self, key: str, layer: int = 0, default: bool = False) -> bool:
        """The truth value at ``key``; of a list, that of ``layer``."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):
            value = value[layer] if layer < len(value) else default
        return bool(value)

    def is_list(self, key: str) -> bool:
        """True if there is a value for each layer."""
        return isinstance(self.metadata.get(f"{self.architecture}.{key}"), tuple)
