"""The blocks that the weights in a GGUF file are kept in, by the kind of matrix: those of its tensors' types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from traces.models.gguf_header import read_gguf_header
from traces.models.gguf_tensors import Tensor
from traces.models.names import parted
from traces.models.quantisation import WeightBlocks, weight_blocks
from traces.models.shape import ModelShape

_ROUTER = "ffn_gate_inp"


def blocks_of(shape: ModelShape) -> WeightBlocks:
    """The blocks of a model: of its GGUF file, or of the weight format of its name; 16 bits without one.

    Raises ShapeError.
    """
    name = parted(shape.name)
    if name.model.lower().endswith(".gguf"):
        return gguf_blocks(Path(name.model))
    return weight_blocks(shape, name.weights or "bf16")


def gguf_blocks(path: Path) -> WeightBlocks:
    """The blocks of each kind of matrix, with the part of the weights that each has. Raises ShapeError."""
    return _blocks(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _blocks(path: Path, changed_ns: int) -> WeightBlocks:
    """``path`` is read anew when it has changed."""
    kinds: dict[str, list[Tensor]] = {kind: [] for kind in WeightBlocks._fields}
    for tensor in read_gguf_header(path).tensors:
        if len(tensor.shape) > 1 and tensor.name.endswith(".weight") and _ROUTER not in tensor.name:
            kinds[_kind(tensor.name)].append(tensor)
    kinds["head"] = kinds["head"] or kinds["embedding"]  # tied
    return WeightBlocks(**{kind: _mix(tensors) for kind, tensors in kinds.items()})


def _kind(name: str) -> str:
    if not name.startswith("blk."):
        return "head" if name == "output.weight" else "embedding"
    if "_exps." not in name:
        return "layers"
    return "down" if "ffn_down" in name else "gate_up"


def _mix(tensors: Iterable[Tensor]) -> dict[str, float]:
    """The part of the weights that has each type."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.type.name.lower()] += tensor.elements
    return {name: count / counts.total() for name, count in counts.items()}
