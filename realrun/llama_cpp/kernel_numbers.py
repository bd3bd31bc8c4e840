"""Times of kernels from the times of small models, by least squares of relative errors.

A step is ``experts' operations x a time + others' operations x a time + chosen experts x a time + a rest``. The first
two times are those of one block of weights, the others of all (``product_times``). The time that tokens in the cache
add to a step gives the times of attention. The rest of a step, without products and attention, gives those of its
layers, of its tokens and of the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from realrun.llama_cpp.bench import BenchPoint
from realrun.llama_cpp.benchmark_models import (
    FEW_LAYERS,
    ON_CPU,
    BenchSizes,
    attention_models,
    expert_models,
    router_pair,
)
from sim.costs.engine import InferenceEngine, load_engine
from sim.costs.kernel_costs import (
    AttentionTimes,
    BlockRates,
    Floats,
    Kernels,
    KernelSteps,
    ProductRates,
    SplitKernels,
    longest_share,
    place_of,
)
from sim.machine.sourced import Sourced
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ExpertWork, ModelShape
from trilane.common.errors import TrilaneError
from trilane.common.files import atomic_path
from trilane.common.schema import to_dict
from trilane.common.yaml_files import yaml_text

Samples = Mapping[str, Mapping[BenchPoint, float]]  # ns, by model
Equations: TypeAlias = tuple[ArrayLike, ArrayLike]  # a matrix [N, U], and its product with the unknowns [U]: times [N]


class ProductTimes(NamedTuple):
    """Times in ns by number of threads: of an operation with ``experts``' weights, by block and ``rows`` of
    ``BenchSizes``; with ``others``, by block and its ``steps``; of an element of a ``chosen`` expert's output."""

    experts: Mapping[str, list[list[float]]]
    others: Mapping[str, list[list[float]]]
    chosen: list[float]


def product_times(samples: Samples, blocks: Sequence[str], threads: Sequence[int], sizes: BenchSizes) -> ProductTimes:
    """Solve for the times that follow from ``samples``."""
    rows, of_blocks = len(sizes.rows), (len(sizes.rows) + len(sizes.steps)) * len(blocks)
    solution = np.array(solved_by_threads(threads, lambda count: _equations(samples, blocks, count, sizes)))
    times = dict(zip(blocks, np.split(solution[:, :of_blocks], len(blocks), axis=1), strict=True))
    experts = {block: ns[:, :rows].tolist() for block, ns in times.items()}
    others = {block: ns[:, rows:].tolist() for block, ns in times.items()}
    return ProductTimes(experts, others, solution[:, of_blocks].tolist())


def _equations(samples: Samples, blocks: Sequence[str], threads: int, sizes: BenchSizes) -> Equations:
    """Equations whose unknowns are the times of each block (of experts by ``rows``, of others by ``steps``), of an
    element of a chosen expert's output, and of a step's rest by ``steps``."""
    rows, width = len(sizes.rows), len(sizes.rows) + len(sizes.steps)
    matrix, times = [], []
    for name, (shape, block) in expert_models(tuple(blocks), sizes).items():
        for step, tokens in enumerate(sizes.steps):
            equation = np.zeros(width * len(blocks) + 1 + len(sizes.steps))
            of_block, rest = equation[blocks.index(block) * width :], equation[width * len(blocks) :]
            of_tokens, of_one = _other_operations(shape, tokens)
            of_block[:rows] = expert_operations(shape, tokens, sizes.rows)
            of_block[rows + step] += of_tokens
            of_block[rows] += of_one
            rest[0], rest[1 + step] = chosen_elements(shape, tokens), 1.0
            matrix.append(equation)
            times.append(samples[name][BenchPoint(threads, 0, tokens)])
    return matrix, times


def expert_operations(shape: ModelShape, tokens: int, rows: tuple[int, ...]) -> Floats:
    """Operations of a step with experts' weights, shared out among ``rows``; the last layer computes one token."""
    expert = 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width
    experts = np.zeros(len(rows))
    for layers, count in ((shape.moe_layers - 1, tokens), (1, 1)):
        work = ExpertWork.of(shape, count)
        experts += layers * work.active * work.rows * expert * _near_rows(work.rows, rows)
    return experts


def _other_operations(shape: ModelShape, tokens: int) -> tuple[float, float]:
    """Operations of a step with other weights, those of all tokens and those of one: the head, and what follows the
    attention of the last layer.
    """
    every = shape.layers * shape.attention_params + shape.dense_layers * shape.dense_ffn_params
    of_tokens = 2.0 * tokens * (every + (shape.moe_layers - 1) * shape.shared_params)
    return of_tokens, 2.0 * (shape.shared_params + shape.vocab * shape.hidden)


def chosen_elements(shape: ModelShape, tokens: int) -> float:
    """Elements of the outputs of all experts that a step's tokens choose."""
    return ((shape.moe_layers - 1) * tokens + 1) * shape.top_k * shape.hidden


def _near_rows(count: float, rows: tuple[int, ...]) -> Floats:
    """Weights [len(rows)], of sum 1, with which ``count`` lies between its neighbours in ``rows``."""
    place = np.interp(np.log(count), np.log(rows), range(len(rows)))
    weights: Floats = np.maximum(1 - np.abs(np.arange(len(rows)) - place), 0.0)
    return weights


def solved(
    matrix: ArrayLike, times: ArrayLike, total: Sequence[float] | None = None, least: Sequence[float] | None = None
) -> list[float]:
    """Unknowns of at least ``least``, or 0, by least squares of errors relative to ``total``, or to the times in ns."""
    known, ns = np.array(matrix), np.array(times)
    floor = np.zeros(known.shape[1]) if least is None else np.array(least)
    weights = 1 / np.maximum(ns if total is None else np.array(total, float), 1.0)
    weighted = known * weights[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    scaled, _ = nnls(weighted / scale, (ns - known @ floor) * weights)
    return [float(unknown) for unknown in floor + scaled / scale]


def solved_by_threads(threads: Sequence[int], equations_of: Callable[[int], Equations]) -> list[list[float]]:
    """Solve for the unknowns with each number of threads, the smallest first: N times as many threads are at most N
    times as fast in everything."""
    first = solved(*equations_of(threads[0]))
    more = [solved(*equations_of(n), least=[ns * threads[0] / n for ns in first]) for n in threads[1:]]
    return [first, *more]


_FREE = 1e18  # operations a second: takes no time


class KernelError(TrilaneError):
    """Times from which no numbers follow, such as those of a busy machine."""


@dataclass(frozen=True)
class KernelNumbers:
    """The numbers that follow from ``samples`` of models of these sizes, for these numbers of threads (of a GPU: 1);
    ``where`` begins every source."""

    samples: Samples
    blocks: tuple[str, ...]
    threads: tuple[int, ...]
    where: str
    sizes: BenchSizes = ON_CPU

    def kernels(self) -> Kernels:
        """Solve for all numbers. Raises KernelError if the machine was too busy."""
        none = self._sourced(tuple(0.0 for _ in self.threads), "")
        kinds = {"grouped": none, "latent": none}
        free = self._sourced(ProductRates((1,), tuple((_FREE,) for _ in self.threads)), "")
        measured, chosen = self._products()
        products = {**measured, "f32": BlockRates(free, free)}
        bare = Kernels(self.threads, products, self._attention(), chosen, kinds, kinds, none)
        router = self._router(bare)
        return self._with_fixed(bare._replace(products={**products, "f32": BlockRates(router, router)}))

    # --- products -----------------------------------------------------------------------------------------------------

    def _products(self) -> tuple[dict[str, BlockRates], Sourced[tuple[float, ...]]]:
        times = product_times(self.samples, self.blocks, self.threads, self.sizes)
        rates = {
            block: BlockRates(
                self._rates(self.sizes.rows, times.experts[block], "models of 4 and 12 experts a token, of 32"),
                self._rates(tuple(self.sizes.steps), times.others[block], "models of 1 and 12 shared experts"),
            )
            for block in self.blocks
        }
        how = "models of 4 and 12 experts a token of 1,024 rows, and of 16 of 256"
        return rates, self._sourced(tuple(times.chosen), how)

    def _router(self, bare: Kernels) -> Sourced[ProductRates]:
        """Rates of the router, from the time that a larger one adds to a step with as many rows of experts."""
        (few_name, few), (many_name, many) = router_pair(self.sizes).items()
        flops = 2.0 * (many.experts - few.experts) * few.hidden

        def times(threads: int, tokens: int) -> float:
            longer_ns = self._left(many_name, many, bare, threads, tokens)
            longer_ns -= self._left(few_name, few, bare, threads, tokens)
            return longer_ns / (flops * ((few.moe_layers - 1) * tokens + 1))  # the last layer has one row

        measured = [[times(threads, tokens) for tokens in self.sizes.attended] for threads in self.threads]
        return self._no_faster_than_products(measured, bare)

    def _no_faster_than_products(self, times: Sequence[Sequence[float]], bare: Kernels) -> Sourced[ProductRates]:
        """Rates of the router. A difference of two models within their noise, 0 or less, gives the rate of the fastest
        product of quantised weights, which are fewer bytes than the router's."""
        how = "models of 64 and 512 experts: the router, and choosing"
        measured = [bare.products[block].others.value.flops_per_s for block in self.blocks]
        least = [1e9 / max(max(rates[place]) for rates in measured) for place in range(len(self.threads))]
        bounded = [[max(ns, low) for ns in row] for row, low in zip(times, least, strict=True)]
        rates = self._rates(tuple(self.sizes.attended), bounded, how)
        if bounded == times:
            return rates
        return Sourced(rates.value, f"{rates.source}; within noise, and bounded by the fastest product", "low")

    def _rates(self, rows: tuple[int, ...], times: Sequence[Sequence[float]], how: str) -> Sourced[ProductRates]:
        """Rates from times of an operation in ns."""
        return self._sourced(plausible_rates(rows, self.threads, times, self.sizes.most_flops_per_s, how), how)

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> AttentionTimes:
        depths = self.sizes.depths
        times = np.array([[self._attention_at(depth, threads) for depth in depths] for threads in self.threads])
        listed = ", ".join(f"{depth:,}" for depth in depths)
        how = f"models of {len(self._attending())} widths and groups, at {listed} tokens and at none"
        byte, pair, width, tile_pair, tile_width = (
            self._sourced(tuple(map(tuple, ns)), how) for ns in np.moveaxis(times, -1, 0).tolist()
        )
        return AttentionTimes(depths, byte, pair, width, tile_pair, tile_width, self.sizes.tile_rows)

    def _attention_at(self, depth: int, threads: int) -> list[float]:
        """Times of a byte, of a pair, of an element of its width, and of the last two in tiles."""
        single = solved(*self._attention_added(depth, threads, (1,)))
        tiles, times = self._attention_added(depth, threads, self.sizes.tiled)
        return single + solved(tiles[:, 1:], np.maximum(times - single[0] * tiles[:, 0], 1.0))

    def _attention_added(self, depth: int, threads: int, steps: Iterable[int]) -> tuple[Floats, Floats]:
        """Equations from the time that ``depth`` tokens in the cache add to a step, whose unknowns are the times of a
        byte, of a pair and of an element of its width."""
        equations, times = [], []
        for name, shape in self._attending().items():
            for tokens in steps:
                deep, flat = (self.samples[name][BenchPoint(threads, at, tokens)] for at in (depth, 0))
                read, pairs, width = _added(shape, tokens, threads, depth)
                equations.append([read, pairs, pairs * width])
                times.append(max(deep - flat, 1.0))
        return np.array(equations), np.array(times)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _with_fixed(self, bare: Kernels) -> Kernels:
        """``bare`` with the times of a step, a layer and a token beyond products and attention."""
        grouped = [self._grouped_rest(bare, threads) for threads in self.threads]
        latent = [
            self._latent_rest(bare, threads, rest[0]) for threads, rest in zip(self.threads, grouped, strict=True)
        ]
        few, most = self.sizes.layers, max(self.sizes.attended)
        how = f"steps of one to {most} tokens of models of {few} and {3 * few} layers, less products and attention"
        (step, layer, token), (latent_layer, latent_token) = zip(*grouped, strict=True), zip(*latent, strict=True)
        return bare._replace(
            layer_ns={"grouped": self._sourced(layer, how), "latent": self._sourced(latent_layer, how)},
            token_ns={"grouped": self._sourced(token, how), "latent": self._sourced(latent_token, how)},
            step_ns=self._sourced(step, how),
        )

    def _grouped_rest(self, bare: Kernels, threads: int) -> list[float]:
        """Times in ns of a step, of a layer and of a token in a layer, of models with grouped attention."""
        equations, times, total = [], [], []
        for name, shape in attention_models(self.sizes).items():
            for tokens in self.sizes.attended if shape.dense_layers == 0 else ():
                equations.append([1.0, shape.layers, shape.layers * tokens])
                times.append(self._left(name, shape, bare, threads, tokens))
                total.append(self.samples[name][BenchPoint(threads, 0, tokens)])
        return solved(equations, times, total)

    def _latent_rest(self, bare: Kernels, threads: int, step_ns: float) -> list[float]:
        """Times in ns of a layer and of a token in a layer, of models with latent attention."""
        name, shape = next((name, shape) for name, shape in attention_models(self.sizes).items() if shape.dense_layers)
        matrix = [[shape.layers, shape.layers * tokens] for tokens in self.sizes.attended]
        times = [self._left(name, shape, bare, threads, tokens) - step_ns for tokens in self.sizes.attended]
        total = [self.samples[name][BenchPoint(threads, 0, tokens)] for tokens in self.sizes.attended]
        return solved(matrix, times, total)

    def _left(self, name: str, shape: ModelShape, bare: Kernels, threads: int, tokens: int) -> float:
        """Time in ns of a step without its products and attention; 0 if these take longer."""
        steps = KernelSteps(shape, WeightBlocks.uniform("q4_0"), bare, place_of(threads, bare.threads))
        return max(self.samples[name][BenchPoint(threads, 0, tokens)] - piece_ns(steps, tokens, tokens), 0.0)

    def _sourced(self, value: object, how: str) -> Sourced:  # type: ignore[type-arg]
        return Sourced(value, f"{self.where}: {how}", "medium")

    def _attending(self) -> dict[str, ModelShape]:
        """Models that were timed with many tokens in the cache."""
        return {name: shape for name, shape in attention_models(self.sizes).items() if name != FEW_LAYERS}


def plausible_rates(
    rows: tuple[int, ...], threads: Sequence[int], times: Sequence[Sequence[float]], most_flops_per_s: float, how: str
) -> ProductRates:
    """Rates from times of an operation in ns, by numbers of threads and of rows.

    More threads are at least as fast as the first number of them, and at most as many times as fast. Raises KernelError
    for times that no processor reaches.
    """
    if min(times[0]) < 1e9 / most_flops_per_s:
        raise KernelError(f"{how}: no rate follows from their times; measure again, without other programs")
    first = [1e9 / ns for ns in times[0]]
    return ProductRates(rows, tuple(
        tuple(min(max(1e9 / max(ns, 1e-9), few), few * count / threads[0]) for ns, few in zip(row, first, strict=True))
        for count, row in zip(threads, times, strict=True)
    ))


def _added(shape: ModelShape, tokens: int, threads: int, depth: int) -> tuple[float, float, float]:
    """Bytes read and pairs computed in addition by a step with ``depth`` more tokens in the cache, and a pair's width.
    """
    [(kind, layers)] = shape.attention_counts
    width = 2 * (kind.kv_width if kind.latent else kind.head_dim)
    share = longest_share(depth + 1, threads) if tokens == 1 else 1.0
    tokens_read = layers * depth * share
    return tokens_read * kind.kv_width * 2.0, tokens_read * kind.heads * tokens, float(width)


# --- the kernels as an engine -----------------------------------------------------------------------------------------


def piece_ns(steps: KernelSteps, tokens: int, context: int) -> float:
    """Time in ns of a piece of ``tokens`` tokens of one sequence, which has ``context`` tokens after it.

    After the attention of the last layer, llama.cpp continues with the piece's last token alone.
    """
    costs, layers = steps.step(tokens, (context,)), steps.shape.moe_layers - 1
    mixture, of_one = (_mixture_ns(steps, count) for count in (tokens, 1))
    return (layers + 1) * costs.attention_ns + layers * mixture + of_one + costs.dense_ns + costs.head_ns


def routed_ns(steps: KernelSteps, tokens: int) -> float:
    """Time in ns of a layer's routed experts for ``tokens`` tokens."""
    work = ExpertWork.of(steps.shape, tokens)
    [expert_ns] = steps.expert_ns(np.array([work.rows]))
    return work.active * float(expert_ns)


def _mixture_ns(steps: KernelSteps, tokens: int) -> float:
    """Time in ns of a layer's gate, shared and routed experts, and of their sum."""
    step = steps.step(tokens, (tokens,))
    return step.gate_ns + step.shared_ns + step.combine_ns + routed_ns(steps, tokens)


BASE = "llama.cpp"


class GpuNumbers(NamedTuple):
    """Kernels of a machine with a GPU: the GPU's, and those of experts on the CPU next to it."""

    gpu_kernels: Kernels
    split: SplitKernels


def write_engine(measured: Kernels | GpuNumbers, about: str, path: Path) -> InferenceEngine:
    """Write an engine file ``like`` llama.cpp, atomically; the engine as it is read back. Raises EngineError."""
    sections = measured._asdict() if isinstance(measured, GpuNumbers) else {"kernels": measured}
    plain = {name: _plain(to_dict(section)) for name, section in sections.items()}
    with atomic_path(path) as aside:
        aside.write_text(yaml_text({"about": about, "like": BASE, **plain}))
        load_engine(str(aside))  # an engine that cannot be read leaves an earlier file as it was
    return load_engine(str(path))


def _plain(value: Any) -> Any:
    """The value with its numbers rounded to five digits, and lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
