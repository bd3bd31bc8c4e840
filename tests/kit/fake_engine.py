"""An engine for tests of benchmarks: its steps take what known kernels say, to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from realrun.llama_cpp.bench import BenchContext, BenchSettings, OpenModel
from realrun.llama_cpp.kernel_engine import piece_ns
from sim.costs.kernel_costs import AttentionTimes, BlockRates, Kernels, KernelSteps, ProductRates, place_of
from sim.machine.sourced import Sourced
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape

ROWS, TOKENS, ROUTER = (1, 4, 16, 64), (1, 8, 32, 128), (1, 16, 128)


def known_kernels(blocks: tuple[str, ...]) -> Kernels:
    """Kernels with one and two threads, the second pair of which is 1.5 times as fast."""
    products = {
        block: BlockRates(_rates(ROWS, (10 + place) * 1e9), _rates(TOKENS, (12 + place) * 1e9))
        for place, block in enumerate(blocks)
    }
    router = _rates(ROUTER, 8e9)
    times = AttentionTimes((512, 2048, 8192), *(_deeper(ns) for ns in (0.05, 30.0, 0.04, 3.0, 0.02)), _of(64))
    layer, token = ({"grouped": _both(ns), "latent": _both(2 * ns)} for ns in (5e4, 4e3))
    return Kernels((1, 2), {**products, "f32": BlockRates(router, router)}, times, _both(2.0), layer, token, _both(2e5))


def _of(value: object) -> Sourced:  # type: ignore[type-arg]
    return Sourced(value, "made up", "low")


def _both(ns: float) -> Sourced[tuple[float, ...]]:
    return _of((ns, ns / 1.5))


def _deeper(ns: float) -> Sourced[tuple[tuple[float, ...], ...]]:
    """Times that grow with the tokens in the cache."""
    deeper = (ns, 1.25 * ns, 2 * ns)
    return _of((deeper, tuple(each / 1.5 for each in deeper)))


def _rates(rows: tuple[int, ...], first: float) -> Sourced[ProductRates]:
    """Rates that grow with the rows."""
    one = tuple(first * (1 + 0.5 * place) for place in range(len(rows)))
    return _of(ProductRates(rows, (one, tuple(1.5 * rate for rate in one))))


@dataclass
class FakeContext:
    """See ``BenchContext``."""

    shape: ModelShape
    blocks: WeightBlocks
    kernels: Kernels
    threads: int = 1
    filled: int = 0

    def compute_ns(self, tokens: int) -> int:
        self.filled += tokens
        steps = KernelSteps(self.shape, self.blocks, self.kernels, place_of(self.threads, self.kernels.threads))
        return round(piece_ns(steps, tokens, self.filled))

    def fill(self, tokens: int) -> None:
        self.filled = tokens

    def keep(self, tokens: int) -> None:
        self.filled = tokens

    def use_threads(self, threads: int) -> None:
        self.threads = threads


def fake_engine(kernels: Kernels, model_of: Callable[[Path], tuple[ModelShape, WeightBlocks]]) -> OpenModel:
    """An engine whose models are those that ``model_of`` names for their files."""

    @contextmanager
    def opened(path: Path, settings: BenchSettings) -> Iterator[BenchContext]:
        yield FakeContext(*model_of(path), kernels)

    return opened
