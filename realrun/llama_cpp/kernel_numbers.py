"""The numbers of an engine's kernels from the times of small models, by least squares of relative errors.

``product_times`` gives those of products and of chosen experts. What depth adds to a step gives the times of attention,
and what products and attention leave of a step those of its layers, its tokens and of itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from realrun.llama_cpp.bench_engine import BenchPoint
from realrun.llama_cpp.benchmark_models import FEW_LAYERS, ON_CPU, BenchSizes, attention_models, router_pair
from realrun.llama_cpp.piece_time import piece_ns
from realrun.llama_cpp.product_times import Samples, product_times, solved
from sim.costs.kernel_costs import KernelSteps
from sim.costs.kernels import AttentionTimes, BlockRates, Floats, Kernels, ProductRates, longest_share, place_of
from sim.machine.sourced import Sourced
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape
from trilane.common.errors import TrilaneError

_FREE = 1e18  # operations a second: takes no time


class KernelError(TrilaneError):
    """Times from which no numbers follow."""


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
        """All of them. Raises KernelError where a machine was too busy for any."""
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
        found = {
            block: BlockRates(
                self._rates(self.sizes.rows, times.experts[block], "models of 4 and 12 experts a token, of 32"),
                self._rates(tuple(self.sizes.steps), times.others[block], "models of 1 and 12 shared experts"),
            )
            for block in self.blocks
        }
        how = "models of 4 and 12 experts a token of 1,024 rows, and of 16 of 256"
        return found, self._sourced(tuple(times.chosen), how)

    def _router(self, bare: Kernels) -> Sourced[ProductRates]:
        """What the larger router adds to a step, beyond the experts that it spreads the rows over."""
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
        bounded = [[max(ns, low) for ns in each] for each, low in zip(times, least, strict=True)]
        found = self._rates(tuple(self.sizes.attended), bounded, how)
        if bounded == times:
            return found
        return Sourced(found.value, f"{found.source}; within noise, and bounded by the fastest product", "low")

    def _rates(self, rows: tuple[int, ...], times: Sequence[Sequence[float]], how: str) -> Sourced[ProductRates]:
        """From times of an operation in ns."""
        return self._sourced(plausible_rates(rows, self.threads, times, self.sizes.most_flops_per_s, how), how)

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> AttentionTimes:
        depths = self.sizes.depths
        found = np.array([[self._attention_at(depth, threads) for depth in depths] for threads in self.threads])
        listed = ", ".join(f"{each:,}" for each in depths)
        how = f"models of {len(self._attending())} widths and groups, at {listed} tokens and at none"
        byte, pair, width, tile_pair, tile_width = (
            self._sourced(tuple(map(tuple, each)), how) for each in np.moveaxis(found, -1, 0).tolist()
        )
        return AttentionTimes(depths, byte, pair, width, tile_pair, tile_width, self.sizes.tile_rows)

    def _attention_at(self, depth: int, threads: int) -> list[float]:
        """Times of a byte, of a pair, of an element of its width, and of the last two in tiles."""
        single = solved(*self._attention_added(depth, threads, (1,)))
        tiles, times = self._attention_added(depth, threads, self.sizes.tiled)
        return single + solved(tiles[:, 1:], np.maximum(times - single[0] * tiles[:, 0], 1.0))

    def _attention_added(self, depth: int, threads: int, steps: Iterable[int]) -> tuple[Floats, Floats]:
        """What ``depth`` tokens in the cache add: unknown times of a byte, of a pair, of an element of its width."""
        equations, times = [], []
        for name, shape in self._attending().items():
            for tokens in steps:
                deep, flat = (self.samples[name][BenchPoint(threads, there, tokens)] for there in (depth, 0))
                read, pairs, width = _added(shape, tokens, threads, depth)
                equations.append([read, pairs, pairs * width])
                times.append(max(deep - flat, 1.0))
        return np.array(equations), np.array(times)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _with_fixed(self, bare: Kernels) -> Kernels:
        """What products and attention leave of a step, a layer and a token."""
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
        """Of a step, of a layer, of a token of a layer."""
        equations, times, total = [], [], []
        for name, shape in attention_models(self.sizes).items():
            for tokens in self.sizes.attended if shape.dense_layers == 0 else ():
                equations.append([1.0, shape.layers, shape.layers * tokens])
                times.append(self._left(name, shape, bare, threads, tokens))
                total.append(self.samples[name][BenchPoint(threads, 0, tokens)])
        return solved(equations, times, total)

    def _latent_rest(self, bare: Kernels, threads: int, step_ns: float) -> list[float]:
        name, shape = next((name, shape) for name, shape in attention_models(self.sizes).items() if shape.dense_layers)
        matrix = [[shape.layers, shape.layers * tokens] for tokens in self.sizes.attended]
        times = [self._left(name, shape, bare, threads, tokens) - step_ns for tokens in self.sizes.attended]
        total = [self.samples[name][BenchPoint(threads, 0, tokens)] for tokens in self.sizes.attended]
        return solved(matrix, times, total)

    def _left(self, name: str, shape: ModelShape, bare: Kernels, threads: int, tokens: int) -> float:
        """The time of a step less that of its products and attention; 0 if these take longer."""
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
    """From times of an operation in ns, by numbers of threads and of rows. More threads are at least as fast as the
    first number of them, and at most as many times as fast. Raises KernelError for times that no processor reaches.
    """
    if min(times[0]) < 1e9 / most_flops_per_s:
        raise KernelError(f"{how}: no rate follows from their times; measure again, without other programs")
    first = [1e9 / ns for ns in times[0]]
    return ProductRates(rows, tuple(
        tuple(min(max(1e9 / max(ns, 1e-9), few), few * count / threads[0]) for ns, few in zip(each, first, strict=True))
        for count, each in zip(threads, times, strict=True)
    ))


def _added(shape: ModelShape, tokens: int, threads: int, depth: int) -> tuple[float, float, float]:
    """What ``depth`` tokens more in the cache add to a step: bytes, pairs, and the width of a pair."""
    [(kind, layers)] = shape.attention_counts
    width = 2 * (kind.kv_width if kind.latent else kind.head_dim)
    share = longest_share(depth + 1, threads) if tokens == 1 else 1.0
    tokens_read = layers * depth * share
    return tokens_read * kind.kv_width * 2.0, tokens_read * kind.heads * tokens, float(width)
