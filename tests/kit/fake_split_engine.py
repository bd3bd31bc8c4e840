"""An engine with a GPU for tests of benchmarks: its steps take what known kernels of both sides say. Written down here
a second time, apart from ``sim.costs.kernel_costs`` and ``trilane.engines.split_speed``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from realrun.llama_cpp.bench import BenchSettings
from realrun.llama_cpp.kernel_engine import piece_ns
from sim.costs.kernel_costs import (
    AttentionTimes,
    BlockRates,
    ExpertCopies,
    Kernels,
    KernelSteps,
    ProductRates,
    SplitKernels,
    place_of,
)
from sim.machine.sourced import Sourced
from traces.models.quantisation import WeightBlocks, bits_of_block
from traces.models.shape import ExpertWork, ModelShape

COPIED_FROM = 32


def known_gpu_kernels(blocks: tuple[str, ...]) -> Kernels:
    """Of a card that reads 0.8 TB a second, and multiplies 50 times 10^12 a second."""
    rates = {
        block: BlockRates(
            _rates((1, 4, 16, 64, 192), (2e12, 4e12, 8e12, 16e12, 25e12)),
            _rates((1, 8, 24, 128, 512), (2.4e12, 8e12, 12e12, 30e12, 50e12)),
        )
        for block in blocks
    }
    router = _rates((1, 16, 128, 512), (4e11, 4e12, 1e13, 2e13))
    times = AttentionTimes((6144,), *(_of(((ns,),)) for ns in (0.0012, 0.4, 0.0009, 0.02, 0.0001)), _of(2))
    layer, token = ({"grouped": _one(ns), "latent": _one(1.5 * ns)} for ns in (45e3, 20.0))
    return Kernels((1,), {**rates, "f32": BlockRates(router, router)}, times, _one(0.004), layer, token, _one(1e5))


def known_split(blocks: tuple[str, ...]) -> SplitKernels:
    """A CPU of two speeds, by threads, and a link of 12 and 24 GB a second."""
    experts = {
        block: _of(ProductRates((1, 4, 8), ((5e10, 8e10, 9e10), (9e10, 15e10, 17e10)))) for block in blocks
    }
    return SplitKernels(
        (4, 8), experts, _of((0.6, 0.4)), _of((60e3, 50e3)),
        ExpertCopies(_of(9e3), _of(1 / 12)), ExpertCopies(_of(8e3), _of(1 / 24)),
    )


@dataclass
class FakeSplitContext:
    """See ``BenchContext``."""

    shape: ModelShape
    blocks: WeightBlocks
    gpu: Kernels
    split: SplitKernels
    settings: BenchSettings
    threads: int = 8
    filled: int = 0

    def compute_ns(self, tokens: int) -> int:
        assert self.settings.gpu
        self.filled += tokens
        steps = KernelSteps(self.shape, self.blocks, self.gpu, 0)
        moved = self.shape.moe_layers - max(self.shape.layers - self.settings.cpu_layers, 0)
        ns = piece_ns(steps, tokens, self.filled)
        for layer in range(moved):
            ns += self._moved_ns(steps, 1 if layer == self.shape.moe_layers - 1 else tokens)
        return round(ns)

    def _moved_ns(self, steps: KernelSteps, tokens: int) -> float:
        """What a layer takes longer with its experts away from the GPU."""
        work = ExpertWork.of(self.shape, tokens)
        [block] = self.blocks.gate_up
        matrices = self.shape.matrices_per_expert * self.shape.hidden * self.shape.expert_width
        if tokens >= COPIED_FROM:
            copies = self.split.mapped if self.settings.mapped else self.split.pinned
            size = matrices * bits_of_block(block) / 8
            return work.active * (copies.expert_ns.value + size * copies.byte_ns.value)
        rows, place = np.array([work.rows]), place_of(self.threads, self.split.threads)
        products = float(self.split.experts[block].value.ns(2.0 * matrices, rows, place)[0])
        outputs = work.active * work.rows * self.shape.hidden * self.split.chosen_ns.value[place]
        on_gpu = work.active * float(steps.expert_ns(rows)[0])
        return work.active * products + outputs + self.split.layer_ns.value[place] - on_gpu

    def fill(self, tokens: int) -> None:
        self.filled = tokens

    def keep(self, tokens: int) -> None:
        self.filled = tokens

    def use_threads(self, threads: int) -> None:
        self.threads = threads


def _of(value: object) -> Sourced:  # type: ignore[type-arg]
    return Sourced(value, "made up", "low")


def _one(ns: float) -> Sourced[tuple[float, ...]]:
    return _of((ns,))


def _rates(rows: tuple[int, ...], flops_per_s: tuple[float, ...]) -> Sourced[ProductRates]:
    return _of(ProductRates(rows, (flops_per_s,)))
