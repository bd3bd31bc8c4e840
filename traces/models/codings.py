"""Codings of quantised weights, by what a CPU does to unpack them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Literal, NamedTuple

from traces.models.gguf_model import blocks_of
from traces.models.names import parted
from traces.models.shape import ModelShape

Coding = Literal["plain", "legacy", "k_quant", "table", "codebook"]
_NAMES: Mapping[Coding, str] = {  # of blocks, as ggml names them; the first that fits
    "codebook": r"iq[1-3]_(xxs|xs|s|m)",  # eight or four weights are an entry of a grid in memory
    "table": r"iq\d_\w+|(mx|nv)fp4",  # a weight is one of 16 values in a register
    "k_quant": r"q\d_k",  # 256 weights, with scales of scales
    "legacy": r"t?q\d_\d|group_\d+",  # a scale for 32 or so
}
_PLAIN_BITS = 8  # numbers of as many bits or more are not unpacked


class Codings(NamedTuple):
    """Parts of the weights that have each coding, of routed experts and of all others, as attention has them."""

    experts: Mapping[Coding, float] = {"plain": 1.0}
    others: Mapping[Coding, float] = {"plain": 1.0}


@cache
def coding_of(block: str) -> Coding:
    """Coding of a block, or of a type of tensors in a GGUF file."""
    return next((coding for coding, name in _NAMES.items() if re.fullmatch(name, block)), "plain")


def codings_of(shape: ModelShape) -> Codings:
    """Codings of a model, also of a file that has changed."""
    return (_codings if parted(shape.name).model.lower().endswith(".gguf") else _known_codings)(shape)


@lru_cache(maxsize=64)
def _known_codings(shape: ModelShape) -> Codings:
    return _codings(shape)


def _codings(shape: ModelShape) -> Codings:
    """Codings by name or file. Published weights of fewer than 8 bits are floats of four, or integers."""
    if parted(shape.name).weights is None and not shape.name.lower().endswith(".gguf"):
        return Codings(_published(shape.weight_bits), _published(shape.dense_bits))
    blocks = blocks_of(shape)
    others = shape.matrices_per_expert - 1  # than ``down``
    gate_up = {block: others * part for block, part in blocks.gate_up.items()}
    return Codings(_mixed([*gate_up.items(), *blocks.down.items()]), _mixed(blocks.attention.items()))


def _published(bits: float) -> Mapping[Coding, float]:
    return {"plain": 1.0} if bits >= _PLAIN_BITS else {"table": 1.0}


def _mixed(blocks: Iterable[tuple[str, float]]) -> dict[Coding, float]:
    """Parts of codings, from blocks in any proportion."""
    mixed: dict[Coding, float] = {}
    for block, part in blocks:
        mixed[coding_of(block)] = mixed.get(coding_of(block), 0.0) + part
    return {coding: part / sum(mixed.values()) for coding, part in mixed.items()}
