"""Models in quantised weight formats, such as ``qwen3-30b-a3b@q4_k_m``.

``quantisations.yaml`` has the block layouts of every format; bits per weight follow from them and the model's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from traces.models.shape import ModelShape, ShapeError
from trilane.common.names import unknown
from trilane.common.yaml_files import read_yaml

_FILE = Path(__file__).with_name("quantisations.yaml")
_CACHE_BITS = 16.0


def quantisation_names() -> list[str]:
    """All formats in the order of the file: the largest first, by maker."""
    return list(_document()["quantisations"])


def quantisations_of(shape: ModelShape) -> list[str]:
    """The formats available for ``shape``: all, or the one that its experts are published in."""
    return [name for name in quantisation_names() if _allowed(shape, name)]


def quantisation_source(name: str) -> str:
    """The source of a format's layout. Raises ShapeError for an unknown one."""
    return str(_entry(name)["source"])


def quantised(shape: ModelShape, name: str) -> ModelShape:
    """``shape`` with its weights in the format ``name``; KV cache and activations in 16 bits.

    Raises ShapeError for an unknown format, and for a model whose published experts are quantised already (gpt-oss) or
    whose expert sizes were read from a quantised file.
    """
    name = name.lower()
    entry = _entry(name)
    if not _allowed(shape, name):
        raise ShapeError(
            f"model {shape.name!r} has experts of {shape.weight_bits:g} bits a weight as it is, and is not quantised "
            f"again: use {' or '.join([repr(shape.name), *(f'{shape.name}@{n}' for n in quantisations_of(shape))])}"
        )
    source = f"{name}: {entry['source']}; blocks: traces/models/quantisations.yaml"
    return replace(
        shape,
        name=f"{shape.name}@{name}",
        weight_bits=_expert_bits(shape, entry),
        dense_bits=_dense_bits(shape, entry),
        kv_bits=_CACHE_BITS,
        sources={**shape.sources, "weight_bits": source, "dense_bits": source, "kv_bits": "assumption: not quantised"},
    )


def _allowed(shape: ModelShape, name: str) -> bool:
    """Whether ``shape`` has 16 bits or more, or is published with its experts in this very format."""
    if shape.expert_bytes or "@" in shape.name:
        return False
    return shape.weight_bits >= 16 or _expert_bits(shape, _entry(name)) == shape.weight_bits


def _expert_bits(shape: ModelShape, entry: Mapping[str, Any]) -> float:
    """Bits per weight of the routed experts: all matrices but one have rows of ``hidden``."""
    others = shape.matrices_per_expert - 1
    down = _bits(entry["down"], shape.expert_width)
    return (others * _bits(entry["gate_up"], shape.hidden) + down) / shape.matrices_per_expert


def _dense_bits(shape: ModelShape, entry: Mapping[str, Any]) -> float:
    """Mean bits per weight of everything else; unchanged for a shape without sizes of it."""
    table = shape.vocab * shape.hidden
    embedding = 0 if shape.tied_embeddings else table
    layers = shape.non_expert_params - table - embedding
    parts = {"layers": layers, "embedding": embedding, "head": table}
    bits = sum(count * _bits(entry[part], shape.hidden) for part, count in parts.items())
    return bits / shape.non_expert_params if shape.non_expert_params else shape.dense_bits


def _bits(blocks: str | Mapping[str, float], row: int) -> float:
    """Bits per weight of a block, or of a mix, for rows of ``row`` weights."""
    parts = {blocks: 1.0} if isinstance(blocks, str) else blocks
    return sum(part * _bits_of_block(block, row) for block, part in parts.items()) / sum(parts.values())


def _bits_of_block(block: str, row: int) -> float:
    layout = _document()["blocks"][block]
    if row % layout["weights"] and "otherwise" in layout:
        return _bits_of_block(layout["otherwise"], row)
    return float(8 * layout["bytes"] / layout["weights"])


def _entry(name: str) -> Mapping[str, Any]:
    """One format of the file. Raises ShapeError naming all there are."""
    known: Mapping[str, Mapping[str, Any]] = _document()["quantisations"]
    if name not in known:
        raise ShapeError(unknown("quantisation", name, known))
    return known[name]


@cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = read_yaml(_FILE)
    return document
