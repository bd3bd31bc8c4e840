"""Engines for tests of benchmarks: their steps take what known kernels say, to the nanosecond.

The times of an engine with a GPU are written down here a second time, apart from ``sim.costs.kernel_costs`` and
``trilane.engines.split_speed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from realrun.llama_cpp.bench import BenchContext, BenchSettings, OpenModel
from realrun.llama_cpp.kernel_numbers import piece_ns
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

ROWS, TOKENS, ROUTER = (1, 4, 16, 64), (1, 8, 32, 128), (1, 16, 128)
COPIED_FROM = 32  # tokens of a piece


def known_kernels(blocks: tuple[str, ...]) -> Kernels:
    """Kernels with one and two threads, the second pair of which is 1.5 times as fast."""
    products = {
        block: BlockRates(_growing(ROWS, (10 + place) * 1e9), _growing(TOKENS, (12 + place) * 1e9))
        for place, block in enumerate(blocks)
    }
    router = _growing(ROUTER, 8e9)
    times = AttentionTimes((512, 2048, 8192), *(_deeper(ns) for ns in (0.05, 30.0, 0.04, 3.0, 0.02)), _of(64))
    layer, token = ({"grouped": _both(ns), "latent": _both(2 * ns)} for ns in (5e4, 4e3))
    return Kernels((1, 2), {**products, "f32": BlockRates(router, router)}, times, _both(2.0), layer, token, _both(2e5))


def known_gpu_kernels(blocks: tuple[str, ...]) -> Kernels:
    """Kernels of a card that reads 0.8 TB a second, and multiplies 50 times 10^12 a second."""
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
    """Kernels of a CPU of two speeds, by threads, and of a link of 12 and 24 GB a second."""
    experts = {block: _rates((1, 4, 8), (5e10, 8e10, 9e10), (9e10, 15e10, 17e10)) for block in blocks}
    return SplitKernels(
        (4, 8), experts, _of((0.6, 0.4)), _of((60e3, 50e3)),
        ExpertCopies(_of(9e3), _of(1 / 12)), ExpertCopies(_of(8e3), _of(1 / 24)),
    )


@dataclass
class FakeContext:
    """See ``BenchContext``."""

    shape: ModelShape
    blocks: WeightBlocks
    kernels: Kernels
    threads: int = field(default=1, kw_only=True)
    filled: int = field(default=0, kw_only=True)

    def compute_ns(self, tokens: int) -> int:
        self.filled += tokens
        return round(self._step_ns(tokens))

    def fill(self, tokens: int) -> None:
        self.filled = tokens

    def keep(self, tokens: int) -> None:
        self.filled = tokens

    def use_threads(self, threads: int) -> None:
        self.threads = threads

    def _step_ns(self, tokens: int) -> float:
        steps = KernelSteps(self.shape, self.blocks, self.kernels, place_of(self.threads, self.kernels.threads))
        return piece_ns(steps, tokens, self.filled)


@dataclass
class FakeSplitContext(FakeContext):
    """A context whose ``kernels`` are a GPU's, with experts on the CPU."""

    split: SplitKernels
    settings: BenchSettings
    threads: int = field(default=8, kw_only=True)

    def _step_ns(self, tokens: int) -> float:
        assert self.settings.gpu
        steps = KernelSteps(self.shape, self.blocks, self.kernels, 0)
        moved = self.shape.moe_layers - max(self.shape.layers - self.settings.cpu_layers, 0)
        ns = piece_ns(steps, tokens, self.filled)
        for layer in range(moved):
            ns += self._moved_ns(steps, 1 if layer == self.shape.moe_layers - 1 else tokens)
        return ns

    def _moved_ns(self, steps: KernelSteps, tokens: int) -> float:
        """Time that a layer takes longer with its experts away from the GPU."""
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


def fake_engine(kernels: Kernels, model_of: Callable[[Path], tuple[ModelShape, WeightBlocks]]) -> OpenModel:
    """An engine whose models are those that ``model_of`` names for their files."""

    @contextmanager
    def opened(path: Path, settings: BenchSettings) -> Iterator[BenchContext]:
        yield FakeContext(*model_of(path), kernels)

    return opened


def _of(value: object) -> Sourced:  # type: ignore[type-arg]
    return Sourced(value, "made up", "low")


def _one(ns: float) -> Sourced[tuple[float, ...]]:
    return _of((ns,))


def _both(ns: float) -> Sourced[tuple[float, ...]]:
    return _of((ns, ns / 1.5))


def _deeper(ns: float) -> Sourced[tuple[tuple[float, ...], ...]]:
    """Times that grow with the tokens in the cache."""
    deeper = (ns, 1.25 * ns, 2 * ns)
    return _of((deeper, tuple(time_ns / 1.5 for time_ns in deeper)))


def _rates(rows: tuple[int, ...], *flops_per_s: tuple[float, ...]) -> Sourced[ProductRates]:
    """Rates by rows, for each number of threads."""
    return _of(ProductRates(rows, flops_per_s))


def _growing(rows: tuple[int, ...], first: float) -> Sourced[ProductRates]:
    """Rates that grow with the rows."""
    one = tuple(first * (1 + 0.5 * place) for place in range(len(rows)))
    return _rates(rows, one, tuple(1.5 * rate for rate in one))
