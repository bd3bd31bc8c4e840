"""The numbers of an engine's kernels from the times of small models, by least squares of relative errors.

A step of a model for products is ``experts' operations x a time + others' operations x a time + a rest``, and these
times are those of one block of weights, the rest that of all. What depth adds to a step gives the times of attention,
and what products and attention leave of a step those of its layers, its tokens and of itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from realrun.llama_cpp.bench_engine import BenchPoint
from realrun.llama_cpp.benchmark_models import (
    DEPTH,
    ROWS,
    STEPS,
    TILED,
    UNTILED,
    attention_models,
    product_models,
    router_pair,
)
from sim.costs.expert_work import ExpertWork
from sim.costs.kernel_costs import KernelSteps
from sim.costs.kernels import AttentionTimes, BlockRates, Floats, Kernels, ProductRates
from sim.machine.plausibility import LIMITS
from sim.machine.sourced import Confidence, Sourced
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape
from trilane.common.errors import TrilaneError

Samples = Mapping[str, Mapping[BenchPoint, float]]  # ns, by model
_TILE_ROWS = 64  # GGML_FA_TILE_Q of ggml-org/llama.cpp ggml/src/ggml-cpu/ops.cpp
_CONFIDENCE: Confidence = "medium"
_FREE = 1e18  # operations a second: takes no time
_STEPS = (1, UNTILED, TILED)


class KernelError(TrilaneError):
    """Times from which no numbers follow."""


@dataclass(frozen=True)
class KernelNumbers:
    """The numbers that follow from ``samples``, for these numbers of threads; ``where`` begins every source."""

    samples: Samples
    blocks: tuple[str, ...]
    threads: tuple[int, ...]
    where: str

    def kernels(self) -> Kernels:
        """All of them. Raises KernelError where a machine was too busy for any."""
        none = self._sourced(tuple(0.0 for _ in self.threads), "")
        kinds = {"grouped": none, "latent": none}
        free = self._sourced(ProductRates((1,), tuple((_FREE,) for _ in self.threads)), "")
        products = {**self._products(), "f32": BlockRates(free, free)}
        bare = Kernels(self.threads, products, self._attention(), kinds, kinds, none)
        router = self._router(bare)
        return self._with_fixed(bare._replace(products={**products, "f32": BlockRates(router, router)}))

    # --- products -----------------------------------------------------------------------------------------------------

    def _products(self) -> dict[str, BlockRates]:
        solved = [self._product_ns(threads) for threads in self.threads]
        found = {}
        for block in self.blocks:
            experts, others = ([times[block][which] for times in solved] for which in (0, 1))
            found[block] = BlockRates(
                self._rates(ROWS, experts, "models of 4 and 12 experts a token, of 32"),
                self._rates(tuple(STEPS), others, "models with dense layers of 26,624 and 2,048 rows"),
            )
        return found

    def _product_ns(self, threads: int) -> dict[str, tuple[list[float], list[float]]]:
        """Times of an operation of each block: of experts by their rows, and of others by the tokens of a step."""
        width = len(ROWS) + len(STEPS)  # unknowns of a block; those of the rest of a step are the last
        equations, times = [], []
        for place, block in enumerate(self.blocks):
            for name, shape in product_models().items():
                for step, tokens in enumerate(STEPS):
                    equation = np.zeros(width * len(self.blocks) + len(STEPS))
                    experts, others = _operations(shape, tokens)
                    equation[place * width : place * width + len(ROWS)] = experts
                    equation[place * width + len(ROWS) + step] = others
                    equation[-len(STEPS) + step] = 1.0
                    equations.append(equation)
                    times.append(self.samples[f"{name}-{block}"][BenchPoint(threads, 0, tokens)])
        found = _solved(equations, times)
        ends = [place * width for place in range(len(self.blocks))]
        return {
            block: (found[end : end + len(ROWS)], found[end + len(ROWS) : end + width])
            for block, end in zip(self.blocks, ends, strict=True)
        }

    def _router(self, bare: Kernels) -> Sourced[ProductRates]:
        """What the larger router adds to a step, beyond the experts that it spreads the rows over."""
        few, many = router_pair().values()
        flops = 2.0 * (many.experts - few.experts) * few.hidden
        rows = [(few.moe_layers - 1) * tokens + 1 for tokens in _STEPS]  # the last layer has one
        times = [
            [self._longer(bare, threads, tokens) / (flops * count) for tokens, count in zip(_STEPS, rows, strict=True)]
            for threads in self.threads
        ]
        return self._no_faster_than_products(times, bare)

    def _no_faster_than_products(self, times: Sequence[Sequence[float]], bare: Kernels) -> Sourced[ProductRates]:
        """Rates of the router. A difference of two models within their noise, 0 or less, gives the rate of the fastest
        product of quantised weights, which are fewer bytes than the router's."""
        how = "models of 64 and 512 experts: the router, and choosing"
        measured = [bare.products[block].others.value.flops_per_s for block in self.blocks]
        least = [1e9 / max(max(rates[place]) for rates in measured) for place in range(len(self.threads))]
        bounded = [[max(ns, low) for ns in each] for each, low in zip(times, least, strict=True)]
        found = self._rates(_STEPS, bounded, how)
        if bounded == times:
            return found
        return Sourced(found.value, f"{found.source}; within noise, and bounded by the fastest product", "low")

    def _longer(self, bare: Kernels, threads: int, tokens: int) -> float:
        few, many = (self._left(name, shape, bare, threads, tokens) for name, shape in router_pair().items())
        return many - few

    def _rates(self, rows: tuple[int, ...], times: Sequence[Sequence[float]], how: str) -> Sourced[ProductRates]:
        """From times of an operation in ns. More threads are no slower than one, and at most as many times as fast."""
        if min(times[0]) < 1e9 / LIMITS["cpu.flops_per_s"].high:
            raise KernelError(f"{how}: no rate follows from their times; measure again, without other programs")
        one, first = [1e9 / ns for ns in times[0]], self.threads[0]
        rates = tuple(
            tuple(
                min(max(1e9 / max(ns, 1e-9), alone), alone * threads / first)
                for ns, alone in zip(each, one, strict=True)
            )
            for threads, each in zip(self.threads, times, strict=True)
        )
        return self._sourced(ProductRates(rows, rates), how)

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> AttentionTimes:
        rows = [self._attention_of(threads, (1, UNTILED)) for threads in self.threads]
        tiles = [
            self._attention_of(threads, (TILED,), known[0]) for threads, known in zip(self.threads, rows, strict=True)
        ]
        columns = (*zip(*rows, strict=True), *list(zip(*tiles, strict=True))[1:])
        how = f"models of {len(_attending())} widths and groups, at {DEPTH:,} tokens and at none"
        tile = Sourced(_TILE_ROWS, "GGML_FA_TILE_Q of ggml-org/llama.cpp ggml/src/ggml-cpu/ops.cpp", "high")
        byte, pair, width, tile_pair, tile_width = (self._sourced(tuple(each), how) for each in columns)
        return AttentionTimes(byte, pair, width, tile_pair, tile_width, tile)

    def _attention_of(self, threads: int, steps: Sequence[int], byte_ns: float | None = None) -> list[float]:
        """Times of a byte, of a pair, and of an element of its width; that of a byte may be known."""
        equations, times = [], []
        for name, shape in _attending().items():
            for tokens in steps:
                deep, flat = (self.samples[name][BenchPoint(threads, depth, tokens)] for depth in (DEPTH, 0))
                read, pairs, width = _added(shape, tokens)
                equations.append([read, pairs, pairs * width] if byte_ns is None else [pairs, pairs * width])
                times.append(max(deep - flat - (byte_ns or 0.0) * read, 1.0))
        found = _solved(equations, times)
        return found if byte_ns is None else [byte_ns, *found]

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _with_fixed(self, bare: Kernels) -> Kernels:
        """What products and attention leave of a step, a layer and a token."""
        grouped = [self._grouped_rest(bare, threads) for threads in self.threads]
        latent = [
            self._latent_rest(bare, threads, rest[0]) for threads, rest in zip(self.threads, grouped, strict=True)
        ]
        how = "steps of one to 128 tokens of models of 3 and 9 layers, less products and attention"
        (step, layer, token), (latent_layer, latent_token) = zip(*grouped, strict=True), zip(*latent, strict=True)
        return bare._replace(
            layer_ns={"grouped": self._sourced(layer, how), "latent": self._sourced(latent_layer, how)},
            token_ns={"grouped": self._sourced(token, how), "latent": self._sourced(latent_token, how)},
            step_ns=self._sourced(step, how),
        )

    def _grouped_rest(self, bare: Kernels, threads: int) -> list[float]:
        """Of a step, of a layer, of a token of a layer."""
        equations, times, total = [], [], []
        for name, shape in attention_models().items():
            for tokens in _STEPS if shape.dense_layers == 0 else ():
                equations.append([1.0, shape.layers, shape.layers * tokens])
                times.append(self._left(name, shape, bare, threads, tokens))
                total.append(self.samples[name][BenchPoint(threads, 0, tokens)])
        return _solved(equations, times, total)

    def _latent_rest(self, bare: Kernels, threads: int, step_ns: float) -> list[float]:
        name, shape = next((name, shape) for name, shape in attention_models().items() if shape.dense_layers)
        equations = [[shape.layers, shape.layers * tokens] for tokens in _STEPS]
        times = [self._left(name, shape, bare, threads, tokens) - step_ns for tokens in _STEPS]
        return _solved(equations, times, [self.samples[name][BenchPoint(threads, 0, tokens)] for tokens in _STEPS])

    def _left(self, name: str, shape: ModelShape, bare: Kernels, threads: int, tokens: int) -> float:
        """The time of a step less that of its products and attention; 0 if these take longer."""
        steps = KernelSteps(shape, WeightBlocks.uniform("q4_0"), bare, bare.place(threads))
        return max(self.samples[name][BenchPoint(threads, 0, tokens)] - steps.piece_ns(tokens, tokens), 0.0)

    def _sourced(self, value: object, how: str) -> Sourced:  # type: ignore[type-arg]
        return Sourced(value, f"{self.where}: {how}", _CONFIDENCE)


def _operations(shape: ModelShape, tokens: int) -> tuple[list[float], float]:
    """Operations of a step with experts' weights, shared out among ``ROWS``, and with others: the head, and what
    follows the attention of the last layer, have one token.
    """
    expert = 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width
    experts = np.zeros(len(ROWS))
    for layers, count in ((shape.moe_layers - 1, tokens), (1, 1)):
        work = ExpertWork.of(shape, count)
        experts += layers * work.active * work.rows * expert * _near_rows(work.rows)
    every = shape.layers * shape.attention_params + shape.dense_layers * shape.dense_ffn_params
    others = tokens * (every + (shape.moe_layers - 1) * shape.shared_params)
    return experts.tolist(), 2.0 * (others + shape.shared_params + shape.vocab * shape.hidden)


def _near_rows(rows: float) -> Floats:
    """How near each of ``ROWS`` is, in parts of 1."""
    place = np.interp(np.log(rows), np.log(ROWS), range(len(ROWS)))
    near: Floats = np.maximum(1 - np.abs(np.arange(len(ROWS)) - place), 0.0)
    return near


def _attending() -> dict[str, ModelShape]:
    """Models that were timed with many tokens in the cache."""
    return {name: shape for name, shape in attention_models().items() if name != "deep"}


def _added(shape: ModelShape, tokens: int) -> tuple[float, float, float]:
    """What ``DEPTH`` tokens more in the cache add to a step: bytes, pairs, and the width of a pair."""
    [(kind, layers)] = shape.attention_counts
    width = 2 * (kind.kv_width if kind.latent else kind.head_dim)
    return layers * DEPTH * kind.kv_width * 2.0, layers * kind.heads * DEPTH * float(tokens), float(width)


def _solved(
    equations: Sequence[Sequence[float] | Floats], times: Sequence[float], total: Sequence[float] | None = None
) -> list[float]:
    """Unknowns of at least 0 that explain times, by least squares of errors relative to ``total``, or to the times."""
    weights = 1 / np.maximum(np.array(times if total is None else total, float), 1.0)
    matrix = np.array(equations, float) * weights[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    found, _ = nnls(matrix / scale, np.array(times, float) * weights)
    return [float(each) for each in found / scale]
