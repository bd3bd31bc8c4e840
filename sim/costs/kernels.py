"""Times of an engine's kernels on one processor, measured one by one (``trilane profile --engine``), and those of a
layer's experts that stay with the CPU, in a model whose other weights are on a GPU (``--n-cpu-moe``).

Each number has a value for every number of threads that was measured; others have that of the next smaller one. CPU
kernels have other rates next to a GPU: llama.cpp keeps such experts in the file's own order of rows, so that they can
be copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.machine.sourced import Sourced
from trilane.common.hints import ASCENDING, NOT_EMPTY, Count, above, at_most, between

Floats = npt.NDArray[np.float64]
ByThreads = Annotated[tuple[Annotated[float, between(0, 1e12)], ...], NOT_EMPTY]
ByDepth = Annotated[tuple[ByThreads, ...], NOT_EMPTY]  # for each number of threads a value for each depth
_CopyNs = Annotated[float, between(0, 1e9)]
_Rates = Annotated[tuple[Annotated[float, above(0), at_most(1e18)], ...], NOT_EMPTY]
Listed = tuple[str, Sequence[Any], tuple[int, ...]]  # a number's name, its lists, and how long they must be
_SPLIT_CELLS, _CELL_BLOCK = 512, 256  # ggml-org/llama.cpp: use_split_kv_path of ops.cpp, llama_kv_cache::get_n_kv


def fits(lists: Sequence[Any], lengths: tuple[int, ...]) -> bool:
    """True if lists within lists have these lengths, from the outermost on."""
    return len(lists) == lengths[0] and all(fits(inner, lengths[1:]) for inner in lists if lengths[1:])


class ProductRates(NamedTuple):
    """Operations a second of products with so many rows, a list for each number of threads.

    With one row, that is mostly the reading of the weights. Times of other numbers of rows are interpolated by their
    logarithm.
    """

    rows: Annotated[tuple[Count, ...], NOT_EMPTY, ASCENDING]
    flops_per_s: Annotated[tuple[_Rates, ...], NOT_EMPTY]

    def ns(self, flops: float, rows: Floats, place: int) -> Floats:
        """Times of products of ``flops`` a row, with the number of threads at ``place``."""
        flop_ns = 1e9 / np.array(self.flops_per_s[place])
        return rows * flops * np.interp(np.log(np.maximum(rows, 1)), np.log(self.rows), flop_ns)


class BlockRates(NamedTuple):
    """Products with one block of weights (``traces/models/quantisations.yaml``)."""

    experts: Sourced[ProductRates]  # routed experts
    others: Sourced[ProductRates]  # attention, shared experts, dense layers, head


class AttentionTimes(NamedTuple):
    """Times of the attention of one layer, measured with ``depths`` tokens in the cache.

    ``cache_byte_ns`` for each byte of keys and values; for each pair of a query and a key, and every head, ``pair_ns``,
    and ``width_ns`` for each element of key and value; in tiles from ``tile_rows`` tokens on.
    """

    depths: Annotated[tuple[Count, ...], NOT_EMPTY, ASCENDING]
    cache_byte_ns: Sourced[ByDepth]
    pair_ns: Sourced[ByDepth]
    width_ns: Sourced[ByDepth]
    tile_pair_ns: Sourced[ByDepth]
    tile_width_ns: Sourced[ByDepth]
    tile_rows: Sourced[Count]

    def at(self, depth: float, new: float, place: int) -> list[float]:
        """Times in ns of a byte, a pair, an element of its width, for ``new`` tokens behind ``depth``: interpolated."""
        tiles = new >= self.tile_rows.value
        pair, width = (self.tile_pair_ns, self.tile_width_ns) if tiles else (self.pair_ns, self.width_ns)
        place_on_axis = np.log(max(depth, 1)), np.log(self.depths)
        return [float(np.interp(*place_on_axis, ns.value[place])) for ns in (self.cache_byte_ns, pair, width)]


def longest_share(keys: int, threads: int) -> float:
    """Keys of the thread that has the most of a token's, over an equal share: they are shared out by cells."""
    cells = -(-keys // _CELL_BLOCK) * _CELL_BLOCK
    return 1.0 if cells < _SPLIT_CELLS else min(-(-cells // threads), keys) * threads / keys


def place_of(threads: int, measured: Sequence[int]) -> int:
    """Place of the values for ``threads`` threads among those that were ``measured``."""
    return max(bisect_right(measured, threads) - 1, 0)


class Kernels(NamedTuple):
    """Times of all kernels. ``layer_ns``: a layer's others, by its attention; ``token_ns``: for every token."""

    threads: Annotated[tuple[Count, ...], NOT_EMPTY, ASCENDING]  # that were measured
    products: Mapping[str, BlockRates]  # by block
    attention: AttentionTimes
    chosen_ns: Sourced[ByThreads]  # of an element of a chosen expert's output, apart from its products
    layer_ns: Mapping[str, Sourced[ByThreads]]  # of "grouped" and "latent" attention
    token_ns: Mapping[str, Sourced[ByThreads]]
    step_ns: Sourced[ByThreads]

    def lists(self) -> Iterator[Listed]:
        """Every number that has a value for each number of threads, and for each depth or number of rows."""
        threads, attention = len(self.threads), self.attention
        for block, rates in self.products.items():
            for name, rate in rates._asdict().items():
                yield f"products.{block}.{name}", rate.value.flops_per_s, (threads, len(rate.value.rows))
        for name in attention._fields[1:-1]:
            yield f"attention.{name}", getattr(attention, name).value, (threads, len(attention.depths))
        yield from ((name, getattr(self, name).value, (threads,)) for name in ("chosen_ns", "step_ns"))
        for name in ("layer_ns", "token_ns"):
            yield from ((f"{name}.{kind}", number.value, (threads,)) for kind, number in getattr(self, name).items())


# --- experts on the CPU, next to a GPU --------------------------------------------------------------------------------


class ExpertCopies(NamedTuple):
    """Copies of experts to the GPU, for large pieces of a prompt: of each expert, and of each of its bytes."""

    expert_ns: Sourced[_CopyNs]
    byte_ns: Sourced[_CopyNs]

    def ns(self, size: int) -> float:
        """Time in ns of the copy of an expert of ``size`` bytes."""
        return self.expert_ns.value + size * self.byte_ns.value


class SplitKernels(NamedTuple):
    """Times of a layer of experts on the CPU, for every number of its ``threads`` that was measured.

    ``layer_ns``: to hand over and back, with both waiting; ``chosen_ns``: of an element of a chosen expert's output,
    apart from its products. Experts are copied from a ``mapped`` file, or from ``pinned`` memory (``--load-mode
    none``).
    """

    threads: Annotated[tuple[Count, ...], NOT_EMPTY, ASCENDING]
    experts: Mapping[str, Sourced[ProductRates]]  # by block
    chosen_ns: Sourced[ByThreads]
    layer_ns: Sourced[ByThreads]
    mapped: ExpertCopies
    pinned: ExpertCopies

    def lists(self) -> Iterator[Listed]:
        """Every number that has a value for each number of threads."""
        threads = len(self.threads)
        for block, rate in self.experts.items():
            yield f"experts.{block}", rate.value.flops_per_s, (threads, len(rate.value.rows))
        yield from ((name, getattr(self, name).value, (threads,)) for name in ("chosen_ns", "layer_ns"))
