"""Cost tables from an engine's kernels as measured on a machine (``sim.costs.kernels``): of one without a GPU, and of
one with a GPU, next to which the CPU has the experts of some layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts, by_layer
from sim.costs.fitted_engine import Copies
from sim.costs.kernels import Floats, Kernels, ProductRates, SplitKernels, longest_share, place_of
from sim.machine.hardware import Hardware
from sim.machine.interpolation import table_ns
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced
from traces.models.attention import Attention
from traces.models.gguf_model import blocks_of
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape
from trilane.common.names import unknown

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
        dense_ns = attention_ns + self._product_ns(blocks.layers, shape.dense_ffn_params, tokens)
        head_ns = self._product_ns(blocks.head, shape.vocab * shape.hidden, len(context))
        return StepCosts(
            attention_ns=round(attention_ns), dense_ns=round(shape.dense_layers * dense_ns),
            gate_ns=round(self._product_ns(_ROUTER, shape.hidden * shape.experts, tokens)),
            speculate_ns=1, estimator_ns=1,
            shared_ns=round(self._product_ns(blocks.layers, shape.shared_params, tokens)),
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
        rest_ns += self._product_ns(self.blocks.layers, kind.params, tokens)
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
