"""Times of experts that stay with the CPU next to a GPU, from the times of small models, by least squares.

A model is timed with its experts on the GPU, and with all of them left to the CPU. The difference, with the GPU's
experts added, is the CPU's: ``experts' operations x a time + chosen elements x a time + layers x a time``; of pieces
whose experts are copied it is ``experts x a time + bytes x a time``. The last layer of a piece computes one token, and
that on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from realrun.llama_cpp.bench import BenchPoint
from realrun.llama_cpp.benchmark_models import (
    COPIED_STEPS,
    HOST_THREADS,
    ON_CPU,
    ON_GPU,
    PINNED,
    SPLIT,
    SPLIT_STEPS,
    expert_models,
)
from realrun.llama_cpp.kernel_numbers import (
    Equations,
    GpuNumbers,
    KernelNumbers,
    Samples,
    chosen_elements,
    expert_operations,
    plausible_rates,
    routed_ns,
    solved,
    solved_by_threads,
)
from sim.costs.kernel_costs import ExpertCopies, Kernels, KernelSteps, ProductRates, SplitKernels
from sim.machine.sourced import Sourced
from traces.models.quantisation import WeightBlocks, bits_of_block
from traces.models.shape import ExpertWork, ModelShape

ROWS = (1, 4, 8)  # of an expert on the CPU: pieces of 32 tokens and more are copied


def gpu_numbers(samples: Samples, blocks: tuple[str, ...], threads: tuple[int, ...], where: str) -> GpuNumbers:
    """Numbers that follow from the times of ``gpu_models``. Raises KernelError if the machine was too busy."""
    gpu = KernelNumbers(samples, blocks, HOST_THREADS, where, ON_GPU).kernels()
    return GpuNumbers(gpu, SplitNumbers(samples, blocks, threads, gpu, where).kernels())


@dataclass(frozen=True)
class SplitNumbers:
    """The numbers that follow from ``samples`` of ``split_models`` and of the same models on the GPU, whose ``gpu``
    kernels are known; ``threads``: of the CPU."""

    samples: Samples
    blocks: tuple[str, ...]
    threads: tuple[int, ...]
    gpu: Kernels
    where: str

    def kernels(self) -> SplitKernels:
        """Solve for all numbers. Raises KernelError if the machine was too busy."""
        unknowns = solved_by_threads(self.threads, self._computed)
        of_blocks = np.split(np.array(unknowns)[:, :-2], len(self.blocks), axis=1)
        experts = {block: self._rates(ns.tolist()) for block, ns in zip(self.blocks, of_blocks, strict=True)}
        *_, chosen, layer = zip(*unknowns, strict=True)
        how = "models of 4, 12 and 16 experts a token, on the GPU and on the CPU"
        return SplitKernels(
            self.threads, experts, self._sourced(chosen, how), self._sourced(layer, how),
            self._copies(SPLIT, unknowns[-1], "a mapped file"), self._copies(PINNED, unknowns[-1], "pinned memory"),
        )

    def _computed(self, threads: int) -> Equations:
        """Equations whose unknowns are the times of an operation by block and ``ROWS``, of an element of an expert's
        output, and of a layer."""
        matrix, times = [], []
        for name, (shape, block) in expert_models(self.blocks, ON_GPU, shared=False).items():
            for tokens in SPLIT_STEPS:
                equation = np.zeros(len(self.blocks) * len(ROWS) + 2)
                at = self.blocks.index(block) * len(ROWS)
                equation[at : at + len(ROWS)] = expert_operations(shape, tokens, ROWS)
                equation[-2:] = chosen_elements(shape, tokens), shape.moe_layers
                added = self._added(name, SPLIT, threads, tokens)
                matrix.append(equation)
                times.append(max(added + self._gpu_ns(shape, block, tokens), 1.0))
        return matrix, times

    def _rates(self, times: list[list[float]]) -> Sourced[ProductRates]:
        """Rates from times of an operation in ns, by number of threads and ``ROWS``."""
        how = "models of 4 and 12 experts a token, on the GPU and on the CPU"
        return self._sourced(plausible_rates(ROWS, self.threads, times, ON_CPU.most_flops_per_s, how), how)

    def _copies(self, variant: str, computed: list[float], memory: str) -> ExpertCopies:
        """Costs of copies to the GPU; ``computed``: the unknowns of experts on the CPU, with most threads."""
        matrix, times, total = [], [], []
        for name, (shape, block) in expert_models(self.blocks, ON_GPU, shared=False).items():
            for tokens in COPIED_STEPS:
                copied = (shape.moe_layers - 1) * ExpertWork.of(shape, tokens).active
                weights = shape.matrices_per_expert * shape.hidden * shape.expert_width
                matrix.append([copied, copied * weights * bits_of_block(block) / 8])
                on_gpu = KernelSteps(shape, WeightBlocks.uniform(block), self.gpu, 0)
                last = self._last_on_cpu(shape, block, computed) - routed_ns(on_gpu, 1)
                added = self._added(name, variant, self.threads[-1], tokens)
                times.append(max(added - last, 1.0))
                total.append(max(added, 1.0))
        expert, byte = solved(matrix, times, total)
        how = f"pieces of {' and '.join(map(str, COPIED_STEPS))} tokens of the same models, copied from {memory}"
        return ExpertCopies(self._sourced(expert, how), self._sourced(byte, how))

    def _last_on_cpu(self, shape: ModelShape, block: str, computed: list[float]) -> float:
        """Time in ns of one layer's experts of one token on the CPU."""
        at = self.blocks.index(block) * len(ROWS)
        products = 2.0 * shape.top_k * shape.matrices_per_expert * shape.hidden * shape.expert_width * computed[at]
        return products + shape.top_k * shape.hidden * computed[-2] + computed[-1]

    def _added(self, name: str, variant: str, threads: int, tokens: int) -> float:
        """Time in ns that a step takes longer if its experts are not on the GPU."""
        alone = self.samples[name][BenchPoint(self.gpu.threads[0], 0, tokens)]
        return self.samples[name + variant][BenchPoint(threads, 0, tokens)] - alone

    def _gpu_ns(self, shape: ModelShape, block: str, tokens: int) -> float:
        """Time in ns of a step's routed experts on the GPU: those of all layers, and of one token in the last."""
        steps = KernelSteps(shape, WeightBlocks.uniform(block), self.gpu, 0)
        return (shape.moe_layers - 1) * routed_ns(steps, tokens) + routed_ns(steps, 1)

    def _sourced(self, value: object, how: str) -> Sourced:  # type: ignore[type-arg]
        return Sourced(value, f"{self.where}: {how}", "medium")
