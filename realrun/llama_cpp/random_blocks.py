"""Random weights in the blocks of llama.cpp's formats, made directly: random bits, with scales of a sensible size.

Blocks: ggml-org/llama.cpp ggml/src/ggml-common.h. What is drawn has mean 0 and the standard deviation asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from traces.models.shape import ShapeError
from trilane.common.names import unknown

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

Bytes = npt.NDArray[np.uint8]


def random_blocks(name: str, count: int, std: float, random: np.random.Generator) -> Bytes:
    """``count`` random blocks [count, bytes] of a format, or elements of f32, f16 and bf16.

    Raises ShapeError for a format that is not known here.
    """
    _, _, size_bytes = block_format(name)
    if name == "f32":
        return (random.standard_normal(count, np.float32) * np.float32(std)).view(np.uint8).reshape(count, 4)
    if name == "bf16":
        high = (random.standard_normal(count, np.float32) * np.float32(std)).view(np.uint16)[1::2]
        return high.copy().view(np.uint8).reshape(count, 2)
    blocks = np.frombuffer(random.bytes(count * size_bytes), np.uint8).reshape(count, -1).copy()
    _SCALES[name](blocks, std)
    return blocks


def block_format(name: str) -> tuple[GGMLQuantizationType, int, int]:
    """The type of this name, and the weights and bytes of its blocks. Raises ShapeError."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if name not in _SCALES:
        raise ShapeError(unknown("block of random weights", name, _SCALES))
    kind = GGMLQuantizationType[name.upper()]
    return kind, *GGML_QUANT_SIZES[kind]


def _at(place: int, unit: float) -> Callable[[Bytes, float], None]:
    """A 16-bit scale at ``place``; ``unit``: the standard deviation of what it multiplies."""

    def scale(blocks: Bytes, std: float) -> None:
        blocks[:, place : place + 2] = np.frombuffer(np.float16(std / unit).tobytes(), np.uint8)

    return scale


def _k_scales(mean: float, unit: float) -> Callable[[Bytes, float], None]:
    """A scale, and one of the minima, which are subtracted, at the start; ``mean``: of the quants."""

    def scale(blocks: Bytes, std: float) -> None:
        both = np.array([std / unit, mean * std / unit], np.float16)
        blocks[:, :4] = np.frombuffer(both.tobytes(), np.uint8)

    return scale


def _power_of_two(blocks: Bytes, std: float) -> None:
    """MXFP4: an exponent in front of eight magnitudes, 0 to 6, of root mean square 2.93."""
    blocks[:, 0] = round(127 + math.log2(std / 2.93))


def _plain(blocks: Bytes, std: float) -> None:
    """Nothing to set."""


_SCALES_VARIANCE = (64**2 - 1) / 12  # of six random bits, whose mean is 31.5


def _k_unit(levels: int) -> float:
    """Standard deviation of scale x quant - mean of the quants x minimum, scales and minima of six random bits."""
    mean, variance = (levels - 1) / 2, (levels**2 - 1) / 12
    product = (_SCALES_VARIANCE + 31.5**2) * (variance + mean**2) - (31.5 * mean) ** 2
    return math.sqrt(product + mean**2 * _SCALES_VARIANCE)


_INT8 = math.sqrt((256**2 - 1) / 12)
_SCALES: Mapping[str, Callable[[Bytes, float], None]] = {  # write scales into random blocks, for a standard deviation
    "f32": _plain,
    "bf16": _plain,
    "q4_0": _at(0, math.sqrt((16**2 - 1) / 12)),
    "q5_0": _at(0, math.sqrt((32**2 - 1) / 12)),
    "q8_0": _at(0, _INT8),
    "q4_k": _k_scales(7.5, _k_unit(16)),
    "q5_k": _k_scales(15.5, _k_unit(32)),
    "q6_k": _at(208, _INT8 * math.sqrt((64**2 - 1) / 12)),
    "mxfp4": _power_of_two,
}
