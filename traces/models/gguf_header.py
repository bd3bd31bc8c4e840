"""Header of a GGUF file, or of all parts of one that is split: metadata by key, checked, and the table of tensors.

The weights are not read. A split file has parts named ``NAME-00001-of-00003.gguf``, each with a header of its own; the
keys ``split.no``, ``split.count`` and ``split.tensors.count`` say which it is (ggml-org/llama.cpp tools/gguf-split).
Other keys begin with the architecture, such as qwen3moe.expert_count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from traces.models.gguf_reader import MOST_TENSORS, GgufPart, Value, read_gguf_part
from traces.models.gguf_tensors import Tensor
from traces.models.shape import ShapeError
from trilane.common.quoting import quoted

_MOST_PARTS = 1000
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_MOST_COUNT = 10**9
_MOST_LAYERS = 1000


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
    _check_tensors(path, tensors, parts[0].metadata.get(_TENSORS, len(tensors)))
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
    """Its keys say what its name says. Raises ShapeError."""
    said = part.metadata.get(_NUMBER, number), part.metadata.get(_COUNT, count) or 1
    if said != (number, count):
        raise ShapeError(
            f"{file}: expected part {number + 1} of {count}, as the name says, its keys {_NUMBER} and {_COUNT} say "
            f"{quoted(said[0])}, counted from 0, of {quoted(said[1])}; name the parts NAME-00001-of-0000N.gguf"
        )


def _check_tensors(path: Path, tensors: tuple[Tensor, ...], count: Value) -> None:
    """As many as the first part says, each once. Raises ShapeError."""
    if len(tensors) > MOST_TENSORS:
        raise ShapeError(f"{path}: expected at most {MOST_TENSORS:,} tensors in all parts, got {len(tensors):,}")
    if len(tensors) != count:
        raise ShapeError(f"{path}: expected {quoted(count)} tensors, as {_TENSORS} says, got {len(tensors):,}")
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
        """As llama.cpp names it."""
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
        """Whether there is a value for each layer."""
        return isinstance(self.metadata.get(f"{self.architecture}.{key}"), tuple)
