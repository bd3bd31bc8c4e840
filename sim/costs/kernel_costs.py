"""Times of an engine's kernels on one processor, and cost tables made of them.

Kernels are measured one by one (``trilane profile --engine``). Tables are of a machine without a GPU, and of one with a
GPU, next to which the CPU has the experts of some layers (``--n-cpu-moe``). Each number has a value for every number of
threads that was measured; others have that of the next smaller one. CPU kernels have other rates next to a GPU:
llama.cpp keeps such experts in the file's own order of rows, so that they can be copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts, by_layer
from sim.machine.hardware import Hardware
from sim.machine.interpolation import table_ns
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced
from traces.models.attention import Attention
from traces.models.gguf_model import blocks_of
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape
from trilane.common.hints import ASCENDING, NOT_EMPTY, Count, above, at_most, between
from trilane.common.names import unknown

Copies = Literal["pinned", "pageable"]  # host memory from which experts are copied
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


# --- cost tables ------------------------------------------------------------------------------------------------------


T = TypeVar("T")
_ROUTER = {"f32": 1.0}


def kernel_costs(shape: ModelShape, hardware: Hardware, kernels: Kernels, max_tokens: int, threads: int) -> CostTable:
    """The cost table for workloads 0..``max_tokens``. Raises HardwareError for weights that were not measured."""
    steps = kernel_steps(shape, kernels, threads)
    table = table_ns(steps.expert_ns(np.arange(max_tokens + 1.0)))
    experts = by_layer(shape, hardware, lambda size: ExpertCosts(table, table, 0, 1, size, writeback_ns=1))
    return CostTable(experts, steps, hardware.link.result_path)


def split_costs(
    shape: ModelShape, hardware: Hardware, gpu: Kernels, split: SplitKernels, copies: Copies, max_tokens: int,
    threads: int,
) -> CostTable:
    """The cost table where the CPU has experts next to a GPU.

    ``copies``: host memory from which experts are copied. Raises HardwareError for weights that were not measured.
    """
    steps, place = kernel_steps(shape, gpu, 1), place_of(threads, split.threads)
    rows = np.arange(max_tokens + 1.0)
    chosen_ns = rows * shape.hidden * split.chosen_ns.value[place]
    products_ns = _expert_products(
        steps, rows, place, lambda block: _of_block(split.experts, block, steps, " on the CPU next to a GPU").value
    )
    gpu_ns, cpu_ns = table_ns(steps.expert_ns(rows)), table_ns(np.sum([chosen_ns, *products_ns], axis=0))
    copied, first_cpu_ns = split.pinned if copies == "pinned" else split.mapped, round(split.layer_ns.value[place])

    def costs_of(size: int) -> ExpertCosts:
        copy_ns = max(round(copied.ns(size)), 1)  # also back: not measured, as llama.cpp does not write experts back
        return ExpertCosts(gpu_ns, cpu_ns, first_cpu_ns, copy_ns, size, writeback_ns=copy_ns)

    return CostTable(by_layer(shape, hardware, costs_of), steps, hardware.link.result_path)


def kernel_steps(shape: ModelShape, kernels: Kernels, threads: int) -> KernelSteps:
    """The steps of a model in the blocks of its weights."""
    return KernelSteps(shape, blocks_of(shape), kernels, place_of(threads, kernels.threads))


@dataclass(frozen=True)
class KernelSteps:
    """Step costs outside the routed experts, and those of one expert."""

    shape: ModelShape
    blocks: WeightBlocks
    kernels: Kernels
    place: int  # of the number of threads

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        shape, blocks = self.shape, self.blocks
        attention_ns = shape.mean_of_layers(lambda kind: self._attention_ns(kind, tokens, context))
        dense_ns = attention_ns + self._product_ns(blocks.dense, shape.dense_ffn_params, tokens)
        head_ns = self._product_ns(blocks.head, shape.vocab * shape.hidden, len(context))
        return StepCosts(
            attention_ns=round(attention_ns), dense_ns=round(shape.dense_layers * dense_ns),
            gate_ns=round(self._product_ns(_ROUTER, shape.hidden * shape.experts, tokens)),
            speculate_ns=1, estimator_ns=1,
            shared_ns=round(self._product_ns(blocks.shared, shape.shared_params, tokens)),
            combine_ns=max(round(tokens * shape.top_k * shape.hidden * self._of(self.kernels.chosen_ns)), 1),
            head_ns=round(head_ns + self._of(self.kernels.step_ns)), routing_ns=0, activations_ns=1, result_ns=1,
        )

    def expert_ns(self, rows: Floats) -> Floats:
        """Times in ns of one expert with each number of rows."""
        products_ns = _expert_products(self, rows, self.place, lambda block: self._rates(block, "experts"))
        total_ns: Floats = np.sum(products_ns, axis=0)
        return total_ns

    def _attention_ns(self, kind: Attention, tokens: int, context: Sequence[int]) -> float:
        """Time in ns of norms and attention of a layer of one kind, with a layer's fixed time."""
        new = tokens / len(context)
        keys = sum(kind.read(new, length) for length in context)
        pairs = kind.heads * sum(kind.pairs(new, length) for length in context)
        byte_ns, pair_ns, width_ns = self.kernels.attention.at(keys / len(context) - new, new, self.place)
        name, width = ("latent", 2 * kind.kv_width) if kind.latent else ("grouped", 2 * kind.head_dim)
        threads = self.kernels.threads[self.place] if tokens == 1 and kind.reach == "full" else 1
        keys_ns = keys * kind.kv_width * self.shape.cache_bits / 8 * byte_ns + pairs * (pair_ns + width * width_ns)
        rest_ns = self._of(self.kernels.layer_ns[name]) + tokens * self._of(self.kernels.token_ns[name])
        blocks = self.blocks.state if kind.reach == "state" else self.blocks.attention
        rest_ns += self._product_ns(blocks, kind.params, tokens)
        return longest_share(context[0], threads) * keys_ns + rest_ns

    def _product_ns(self, blocks: Mapping[str, float], weights: int, rows: int) -> float:
        """Time in ns of matrices of ``weights`` elements, applied to ``rows``."""
        one, rates = np.array([float(rows)]), {block: self._rates(block, "others") for block in blocks}
        return float(sum(part * rates[block].ns(2.0 * weights, one, self.place)[0] for block, part in blocks.items()))

    def _rates(self, block: str, which: str) -> ProductRates:
        rates = _of_block(self.kernels.products, block, self)
        return (rates.experts if which == "experts" else rates.others).value

    def _of(self, number: Sourced[tuple[float, ...]]) -> float:
        return number.value[self.place]


def _expert_products(
    steps: KernelSteps, rows: Floats, place: int, rates_of: Callable[[str], ProductRates]
) -> list[Floats]:
    """Times in ns of the products of one expert with each number of rows, at the rates of its weights' blocks."""
    shape, blocks = steps.shape, steps.blocks
    parts = [(blocks.gate_up, shape.matrices_per_expert - 1), (blocks.down, 1)]
    flops = 2.0 * shape.hidden * shape.expert_width  # of a matrix, a row
    return [
        part * rates_of(block).ns(count * flops, rows, place) for mix, count in parts for block, part in mix.items()
    ]


def _of_block(measured: Mapping[str, T], block: str, steps: KernelSteps, where: str = "") -> T:
    """Measurement of a block of weights. Raises HardwareError naming those that were measured."""
    if block not in measured:
        what = f"weights were not measured{where}: {unknown('block', block, measured)}"
        raise HardwareError(f"model {steps.shape.name!r}: {what}")
    return measured[block]
