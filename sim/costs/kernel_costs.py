"""Step costs on one processor, from an engine's kernels there (``sim.costs.kernels``), and cost tables of a machine
without a GPU. One with a GPU: ``sim.costs.split_costs``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts, by_layer
from sim.costs.kernels import Floats, Kernels, ProductRates, longest_share
from sim.machine.hardware import Hardware
from traces.models.attention import Attention
from traces.models.gguf_blocks import blocks_of
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape
from trilane.common.names import unknown
from trilane.machines.plausibility import HardwareError
from trilane.machines.sourced import Sourced

_ROUTER = {"f32": 1.0}


def kernel_costs(shape: ModelShape, hardware: Hardware, kernels: Kernels, max_tokens: int, threads: int) -> CostTable:
    """The cost table for workloads 0..``max_tokens``. Raises HardwareError for weights that were not measured."""
    steps = kernel_steps(shape, kernels, threads)
    table = whole_ns(steps.expert_ns(np.arange(max_tokens + 1.0)))
    contention = hardware.contention

    def costs_of(size: int) -> ExpertCosts:
        return ExpertCosts(
            gpu_ns=table, cpu_ns=table, first_cpu_ns=0, copy_ns=1, expert_bytes=size, writeback_ns=1,
            cpu_permille=contention.cpu_permille, copy_permille=contention.copy_permille, between_ns=0,
        )  # fmt: skip

    return CostTable(by_layer(shape, costs_of), steps, hardware.link.result_path)


def whole_ns(ns: Floats) -> tuple[int, ...]:
    """Whole ns by workload, never less for more tokens; no tokens, no time."""
    _, *others = np.maximum.accumulate(np.maximum(np.rint(ns), 0)).astype(int).tolist()
    return (0, *(max(each, 1) for each in others))


def kernel_steps(shape: ModelShape, kernels: Kernels, threads: int) -> KernelSteps:
    """The steps of a model in the blocks of its weights."""
    return KernelSteps(shape, blocks_of(shape), kernels, kernels.place(threads))


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
        attention = sum(self._attention(kind, tokens, context) * count for kind, count in shape.attention_counts)
        dense = attention / shape.layers + self._product(blocks.layers, shape.dense_ffn_params, tokens)
        head = self._product(blocks.head, shape.vocab * shape.hidden, len(context))
        return StepCosts(
            attention_ns=round(attention / shape.layers), dense_ns=round(shape.dense_layers * dense),
            gate_ns=round(self._product(_ROUTER, shape.hidden * shape.experts, tokens)), speculate_ns=1, estimator_ns=1,
            shared_ns=round(self._product(blocks.layers, shape.shared_params, tokens)),
            combine_ns=max(round(tokens * shape.top_k * shape.hidden * self._of(self.kernels.chosen_ns)), 1),
            head_ns=round(head + self._of(self.kernels.step_ns)), routing_ns=0, activations_ns=1, result_ns=1,
        )  # fmt: skip

    def expert_ns(self, rows: Floats) -> Floats:
        """One expert with each number of rows."""
        matrix, others = self.shape.hidden * self.shape.expert_width, self.shape.matrices_per_expert - 1
        parts = [(self.blocks.gate_up, others), (self.blocks.down, 1)]
        times = [
            part * self._rates(block, "experts").ns(2.0 * count * matrix, rows, self.place)
            for blocks, count in parts for block, part in blocks.items()
        ]  # fmt: skip
        total: Floats = np.sum(times, axis=0)
        return total

    def _attention(self, kind: Attention, tokens: int, context: Sequence[int]) -> float:
        """Norms and attention of a layer of one kind, with a layer's fixed time."""
        new, name = tokens / len(context), "latent" if kind.latent else "grouped"
        keys = sum(kind.read(new, length) for length in context)
        pairs = kind.heads * sum(kind.pairs(new, length) for length in context)
        byte_ns, pair_ns, width_ns = self.kernels.attention.at(keys / len(context) - new, new, self.place)
        width = 2 * (kind.kv_width if kind.latent else kind.head_dim)
        threads = self.kernels.threads[self.place] if tokens == 1 and kind.reach == "full" else 1
        keys_ns = keys * kind.kv_width * self.shape.cache_bits / 8 * byte_ns + pairs * (pair_ns + width * width_ns)
        rest = self._of(self.kernels.layer_ns[name]) + tokens * self._of(self.kernels.token_ns[name])
        most = longest_share(context[0], threads)
        return self._product(self.blocks.layers, kind.params, tokens) + most * keys_ns + rest

    def _product(self, blocks: Mapping[str, float], weights: int, rows: int) -> float:
        """Matrices of ``weights`` elements, applied to ``rows``."""
        one, rates = np.array([float(rows)]), {block: self._rates(block, "others") for block in blocks}
        return float(sum(part * rates[block].ns(2.0 * weights, one, self.place)[0] for block, part in blocks.items()))

    def _rates(self, block: str, which: str) -> ProductRates:
        products = self.kernels.products
        if block not in products:
            raise HardwareError(
                f"model {self.shape.name!r}: weights were not measured: {unknown('block', block, products)}"
            )
        return (products[block].experts if which == "experts" else products[block].others).value

    def _of(self, number: Sourced[tuple[float, ...]]) -> float:
        return number.value[self.place]
