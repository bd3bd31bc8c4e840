"""Models in quantised weight formats, such as ``qwen3-30b-a3b@q4_k_m``.

``quantisations.yaml`` has the block layouts of every format; bits per weight follow from them and the model's shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from traces.models.names import parted
from traces.models.shape import ModelShape, PartBits, ShapeError
from trilane.common.hints import Count, above
from trilane.common.names import unknown
from trilane.common.quoting import quoted
from trilane.common.yaml_files import read_bundled

_FILE = Path(__file__).with_name("quantisations.yaml")
_CACHE_BITS = 16.0
_OTHER_FORMATS = {"f16": "fp16", "mxfp4moe": "mxfp4", "fp8dynamic": "fp8", "w8a8": "int8"}
WeightFiles = Literal["gguf", "ik", "safetensors"]  # ik: what only ik_llama.cpp reads
_Mix = str | Mapping[str, Annotated[float, above(0)]]  # a block, or blocks and their parts


class _Block(NamedTuple):
    """A number of neighbouring weights of a row, and the bytes that they take together."""

    size_bytes: Annotated[float, above(0)]
    weights: Count
    source: str
    otherwise: str | None = None  # the block of rows that are not a multiple of ``weights``


class _Quantisation(NamedTuple):
    """The blocks that a model in this format is made of."""

    gate_up: _Mix
    down: _Mix
    attention: _Mix
    embedding: _Mix
    head: _Mix
    files: tuple[WeightFiles, ...]
    source: str
    state: _Mix | None = None  # None: as ``attention``
    shared: _Mix | None = None  # of shared experts and dense layers; None: ``gate_up`` and ``down``
    router: _Mix = "f32"
    only: str | None = None  # the one model that is published in it


class _Formats(NamedTuple):
    blocks: Mapping[str, _Block]
    quantisations: Mapping[str, _Quantisation]


def quantisation_names() -> list[str]:
    """All formats in the order of the file: the largest first, by maker."""
    return list(_formats().quantisations)


@cache
def format_named(text: str) -> str:
    """The format that a text means: ``Q4_K_M``, ``q4-k-m``, ``Q8`` and ``UD-Q4_K_XL`` are names of formats as people
    write them. Raises ShapeError for one that is not known, naming the nearest, and for one that may be several.
    """
    by_key = {_key(name): name for name in quantisation_names()}
    key = _key(text)
    key = _OTHER_FORMATS.get(key, key)
    for other in (key, f"ud{key}" if key.endswith("xl") else key, key.removeprefix("ud")):
        if other in by_key:
            return by_key[other]
    bits = re.match(r"(?:ud)?i?q?(\d)", key)
    alike = [name for name in quantisation_names() if bits and f"q{bits[1]}" in name] or quantisation_names()
    meant = [name for name in alike if _key(name).startswith(re.sub(r"^(\d)bits?$", r"q\1", key))]
    if len(meant) == 1 and "bit" not in key:
        return meant[0]
    if meant:
        raise ShapeError(f"{quoted(text)} names several formats of weights: choose {' or '.join(meant[:3])}")
    raise ShapeError(unknown("quantisation", text, alike, "trilane models --quantisations"))


def _key(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def quantisations_of(shape: ModelShape) -> list[str]:
    """The formats available for ``shape``: all but those of another model, or the one that its experts are published
    in."""
    own = (None, parted(shape.name).model)
    return [name for name in quantisation_names() if _allowed(shape, name) and _entry(name).only in own]


def quantisation_source(name: str) -> str:
    """The source of a format's layout. Raises ShapeError for an unknown one."""
    return _entry(name).source


def quantisation_files(name: str) -> tuple[WeightFiles, ...]:
    """Files that a format is published in. Raises ShapeError for an unknown one."""
    return _entry(name).files


class WeightBlocks(NamedTuple):
    """Blocks of a model's matrices, and the part of the weights that each has."""

    gate_up: Mapping[str, float]  # of routed experts
    down: Mapping[str, float]
    attention: Mapping[str, float]
    state: Mapping[str, float]  # linear attention and state-space layers
    shared: Mapping[str, float]  # shared experts
    dense: Mapping[str, float]  # feed-forward parts of dense layers
    embedding: Mapping[str, float]
    head: Mapping[str, float]

    @classmethod
    def uniform(cls, block: str) -> WeightBlocks:
        """One block for all matrices."""
        return cls(*[{block: 1.0}] * len(cls._fields))


def weight_blocks(shape: ModelShape, name: str) -> WeightBlocks:
    """The blocks of ``shape`` in a format, by the lengths of its rows. Raises ShapeError for an unknown format."""
    entry, row = _entry(name), shape.hidden
    return WeightBlocks(
        gate_up=_blocks(entry.gate_up, row), down=_blocks(entry.down, shape.expert_width),
        attention=_blocks(entry.attention, row), state=_blocks(entry.state or entry.attention, row),
        shared=_feed_forward(shape, entry, shape.shared_width), dense=_feed_forward(shape, entry, shape.dense_width),
        embedding=_blocks(entry.embedding, row), head=_blocks(entry.head, row),
    )


def _feed_forward(shape: ModelShape, entry: _Quantisation, width: int) -> dict[str, float]:
    """The blocks of a shared expert or a dense layer of ``width``: llama.cpp treats them as it does routed experts."""
    others = shape.matrices_per_expert - 1
    mixed: dict[str, float] = {}
    matrices = (entry.shared or entry.gate_up, shape.hidden, others), (entry.shared or entry.down, width, 1)
    for mix, row, count in matrices:
        for block, part in _blocks(mix, row).items():
            mixed[block] = mixed.get(block, 0.0) + part * count / (others + 1)
    return mixed


def block_of_row(name: str, row: int) -> str:
    """The block that rows of ``row`` weights are kept in where ``name`` is wanted."""
    block = _formats().blocks[name]
    return block_of_row(block.otherwise, row) if row % block.weights and block.otherwise else name


def quantised(shape: ModelShape, name: str) -> ModelShape:
    """``shape`` with its weights in the format ``name``; KV cache and activations in 16 bits.

    Raises ShapeError for an unknown format, and for a model whose published experts are quantised already (gpt-oss),
    unless they are written out in 16 bits, or whose expert sizes were read from a quantised file.
    """
    name = format_named(name)
    entry = _entry(name)
    published = shape.expert_bytes or parted(shape.name).weights
    written_out = not published and _expert_bits(shape, entry) == 16  # as programs without the published format do
    if not (_allowed(shape, name) or written_out):
        raise ShapeError(
            f"model {shape.name!r} has experts of {shape.weight_bits:g} bits a weight as it is, and is not quantised "
            f"again: use {' or '.join([repr(shape.name), *(f'{shape.name}@{n}' for n in quantisations_of(shape))])}"
        )
    bits = _part_bits(shape, name)
    source = f"{name}: {entry.source}; blocks: traces/models/quantisations.yaml"
    return replace(
        shape,
        name=f"{shape.name}@{name}",
        weight_bits=_expert_bits(shape, entry),
        dense_bits=_mean(shape, bits),
        part_bits=bits,
        kv_bits=_CACHE_BITS,
        sources={**shape.sources, "weight_bits": source, "dense_bits": source, "kv_bits": "assumption: not quantised"},
    )


def _allowed(shape: ModelShape, name: str) -> bool:
    """True if ``shape`` has 16 bits or more, or is published with its experts in this very format."""
    if shape.expert_bytes or parted(shape.name).weights:
        return False
    return shape.weight_bits >= 16 or _expert_bits(shape, _entry(name)) == shape.weight_bits


def _expert_bits(shape: ModelShape, entry: _Quantisation) -> float:
    """Bits per weight of the routed experts: all matrices but one have rows of ``hidden``."""
    others = shape.matrices_per_expert - 1
    gate_up, down = _blocks(entry.gate_up, shape.hidden), _blocks(entry.down, shape.expert_width)
    return (others * _bits(gate_up) + _bits(down)) / shape.matrices_per_expert


def _part_bits(shape: ModelShape, name: str) -> PartBits:
    """Bits per weight of each part; a tied table of embeddings is kept as the head is."""
    blocks, router = weight_blocks(shape, name), _blocks(_entry(name).router, shape.hidden)
    parts = blocks._asdict() | {"router": router} | ({"embedding": blocks.head} if shape.tied_embeddings else {})
    return PartBits(**{part.name: _bits(parts[part.name]) for part in fields(PartBits)})


def _mean(shape: ModelShape, bits: PartBits) -> float:
    """Mean bits per weight outside the routed experts; unchanged for a shape without sizes of it."""
    total = sum(count * getattr(bits, part) for part, count in shape.part_params.items())
    return total / shape.non_expert_params if shape.non_expert_params else shape.dense_bits


def _bits(blocks: Mapping[str, float]) -> float:
    """Bits per weight of blocks, by their parts of the weights."""
    return sum(part * bits_of_block(block) for block, part in blocks.items())


def _blocks(mix: _Mix, row: int) -> dict[str, float]:
    """The blocks of a mix for rows of ``row`` weights; parts of 1."""
    parts = {mix: 1.0} if isinstance(mix, str) else mix
    mixed: dict[str, float] = {}
    for block, part in parts.items():
        kept = block_of_row(block, row)
        mixed[kept] = mixed.get(kept, 0.0) + part / sum(parts.values())
    return mixed


def bits_of_block(name: str) -> float:
    """Bits a weight, scales included."""
    block = _formats().blocks[name]
    return float(8 * block.size_bytes / block.weights)


def _entry(name: str) -> _Quantisation:
    """One format of the file. Raises what ``format_named`` raises."""
    return _formats().quantisations[format_named(name)]


@cache
def _formats() -> _Formats:
    formats: _Formats = read_bundled(_Formats, _FILE, ShapeError)
    return formats
