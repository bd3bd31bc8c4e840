"""GGUF files of random weights: a model of any size in a format of llama.cpp, as fast as the disk takes it.

A few random blocks are repeated, so that the content is made in no time, while every byte of the file has its own
address. Their number is odd and prime: experts, which have an even number of blocks, do not repeat each other. Routers
are random throughout, and every expert is about as likely as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from realrun.llama_cpp.gguf_layouts import TensorLayout, gguf_layout
from realrun.llama_cpp.random_blocks import Bytes, block_format, random_blocks
from traces.models.quantisation import WeightBlocks, block_of_row
from traces.models.shape import ModelShape, ShapeError
from trilane.common.files import atomic_path

_PATTERN_BLOCKS = 65_521  # the largest prime below 2 ** 16


def write_random_gguf(shape: ModelShape, architecture: str, blocks: WeightBlocks, path: Path, seed: int = 0) -> None:
    """Write a model: aside first, then renamed.

    ``architecture``: as llama.cpp calls it; ``blocks``: see ``weight_blocks``. Matrices whose rows do not fill a block
    have another one, as with llama.cpp's own quantiser. Raises ShapeError for a family or a block that is not known
    here, and OSError.
    """
    from gguf import GGUFEndian, GGUFWriter
    from gguf import GGUFValueType as Kind
    from gguf.quants import quant_shape_to_byte_shape

    layout = gguf_layout(shape, architecture)
    chosen = [(tensor, _block_of(tensor, blocks, shape.moe_layers)) for tensor in layout.tensors]
    types = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}
    with atomic_path(path) as aside:
        writer = GGUFWriter(aside, architecture, endianess=GGUFEndian.LITTLE)
        for key, value in layout.metadata.items():
            writer.add_key_value(key, value, types[type(value)])
        for tensor, block in chosen:
            kind, _, _ = block_format(block)
            rows = quant_shape_to_byte_shape(tensor.shape[::-1], kind)
            writer.add_tensor_info(tensor.name, rows, np.dtype(np.uint8), math.prod(rows), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for content in _contents(chosen, np.random.default_rng(seed)):
            writer.write_tensor_data(content)
        writer.close()


def _contents(chosen: list[tuple[TensorLayout, str]], random: np.random.Generator) -> Iterator[Bytes]:
    """The bytes of each tensor, one at a time."""
    made: dict[tuple[str, float], Bytes] = {}
    for tensor, block in chosen:
        _, weights, size_bytes = block_format(block)
        count = math.prod(tensor.shape) // weights
        std = 1 / math.sqrt(tensor.shape[0])  # outputs are as large as inputs
        if tensor.constant is not None:
            yield np.full(count, tensor.constant, np.float32).view(np.uint8)
        elif block == "f32":
            yield random_blocks(block, count, std, random).reshape(-1)
        else:
            std = 1.0 if tensor.part == "embedding" else std
            if (block, std) not in made:
                made[block, std] = random_blocks(block, _PATTERN_BLOCKS, std, random).reshape(-1)
            yield np.resize(made[block, std], count * size_bytes)


def _block_of(tensor: TensorLayout, blocks: WeightBlocks, layers: int) -> str:
    """The block of a tensor; a mix is spread over the layers."""
    if tensor.part == "f32":
        return "f32"
    mix: Mapping[str, float] = getattr(blocks, tensor.part)
    found = _at_layer(mix, tensor.layer, layers)
    kept = block_of_row(found, tensor.shape[0])
    _, weights, _ = block_format(kept)
    if tensor.shape[0] % weights:
        raise ShapeError(f"{tensor.name}: rows of {tensor.shape[0]} weights: no block of random weights fits them")
    return kept


def _at_layer(mix: Mapping[str, float], layer: int, layers: int) -> str:
    """The block of a layer: rarer ones evenly spread, the first of the mix everywhere else."""
    first, *others = mix
    for block in others:
        count = round(mix[block] * layers)
        if (layer + 1) * count // layers > layer * count // layers:
            return block
    return first
