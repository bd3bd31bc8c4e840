"""The numbers of an engine's kernels from the times of small models, by differences between models of a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from realrun.llama_cpp.bench_engine import Point
from realrun.llama_cpp.benchmark_models import (
    DEPTH,
    ROWS,
    TILED,
    UNTILED,
    attention_models,
    product_pairs,
    router_pair,
)
from sim.costs.kernel_costs import KernelSteps
from sim.costs.kernels import AttentionTimes, BlockRates, Kernels, ProductRates
from sim.machine.sourced import Confidence, Sourced
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape

Samples = Mapping[str, Mapping[Point, float]]  # ns, by model
_TILE_ROWS = 64  # GGML_FA_TILE_Q of ggml-org/llama.cpp ggml/src/ggml-cpu/ops.cpp
_CONFIDENCE: Confidence = "medium"


@dataclass(frozen=True)
class KernelNumbers:
    """The numbers that follow from ``samples``, of ``threads``; ``where`` begins every source: engine, machine, date."""

    samples: Samples
    blocks: tuple[str, ...]
    threads: tuple[int, ...]
    where: str

    def kernels(self) -> Kernels:
        """All of them."""
        products = {block: self._block(block) for block in self.blocks}
        router = self._sourced(self._router(), "models of 64 and 512 experts: the router, and choosing")
        products["f32"] = BlockRates(router, router)
        attention = self._attention()
        none = {kind: self._sourced(tuple(0.0 for _ in self.threads), "") for kind in ("grouped", "latent")}
        bare = Kernels(self.threads, products, attention, none, none, none["grouped"])
        return self._with_fixed(bare)

    # --- products -----------------------------------------------------------------------------------------------------

    def _block(self, block: str) -> BlockRates:
        few, many, wide = product_pairs().values()
        experts = (many.experts - few.experts) * few.moe_layers * 2.0 * 3 * few.hidden * few.expert_width
        dense = 2.0 * (wide.dense_ffn_params - few.dense_ffn_params)
        return BlockRates(
            self._sourced(
                self._rates(f"many-{block}", f"few-{block}", experts, tuple(ROWS)),
                "models of 12 and 4 experts, all of them chosen",
            ),
            self._sourced(
                self._rates(f"wide-{block}", f"few-{block}", dense, tuple(ROWS)),
                f"models with dense layers of {wide.dense_width:,} and {few.dense_width:,} rows",
            ),
        )

    def _router(self) -> ProductRates:
        few, many = router_pair().values()
        flops = 2.0 * (many.experts - few.experts) * few.hidden * few.moe_layers
        return self._rates("many-rows", "few-rows", flops, (1, UNTILED, TILED))

    def _rates(self, larger: str, smaller: str, flops: float, rows: tuple[int, ...]) -> ProductRates:
        """Of the products that the larger model has in addition, ``flops`` a row."""
        return ProductRates(
            rows,
            tuple(
                tuple(flops * count / max(self._longer(larger, smaller, count, threads), 1.0) * 1e9 for count in rows)
                for threads in self.threads
            ),
        )

    def _longer(self, larger: str, smaller: str, tokens: int, threads: int) -> float:
        point = Point(threads, 0, tokens)
        return self.samples[larger][point] - self.samples[smaller][point]

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> AttentionTimes:
        few = [self._attention_of(threads, (1, UNTILED)) for threads in self.threads]
        cache = [fit[0] for fit in few]
        tiled = [
            self._attention_of(threads, (TILED,), known) for threads, known in zip(self.threads, cache, strict=True)
        ]
        told = f"models of {len(self._attending())} widths and groups, at {DEPTH:,} tokens and at none"
        columns = (cache, *zip(*(fit[1:] for fit in few), strict=True), *zip(*(fit[1:] for fit in tiled), strict=True))
        rows = Sourced(_TILE_ROWS, "GGML_FA_TILE_Q of ggml-org/llama.cpp ggml/src/ggml-cpu/ops.cpp", "high")
        return AttentionTimes(*(self._sourced(tuple(map(float, each)), told) for each in columns), rows)

    def _attention_of(
        self, threads: int, tokens: Sequence[int], cache_byte_ns: float | None = None
    ) -> tuple[float, float, float]:
        """Times of a byte, a pair and an element of its width: those that explain what depth adds, by least squares of
        relative errors; that of a byte may be known.
        """
        rows, times = [], []
        for name, shape in self._attending().items():
            for count in tokens:
                added = self.samples[name][Point(threads, DEPTH, count)] - self.samples[name][Point(threads, 0, count)]
                read, pairs, width = _added(shape, count)
                known = 0.0 if cache_byte_ns is None else read * cache_byte_ns
                weight = 1 / max(added, 1.0)
                rows.append([read * weight if cache_byte_ns is None else 0.0, pairs * weight, pairs * width * weight])
                times.append(max(added - known, 0.0) * weight)
        found, _ = nnls(np.array(rows), np.array(times))
        return (found[0] if cache_byte_ns is None else cache_byte_ns), float(found[1]), float(found[2])

    def _attending(self) -> dict[str, ModelShape]:
        return {name: shape for name, shape in attention_models().items() if name != "deep"}

    # --- what is left -------------------------------------------------------------------------------------------------

    def _with_fixed(self, bare: Kernels) -> Kernels:
        """What products and attention leave of a step, a layer and a token."""
        step, layer, token = [], [], []
        for threads in self.threads:
            one, many = (self._left("grouped", bare, threads, count) for count in (1, TILED))
            deep = self._left("deep", bare, threads, 1)
            added = attention_models()["deep"].layers - attention_models()["grouped"].layers
            of_layer = max((deep - one) / added, 0.0)
            layers = attention_models()["grouped"].layers
            step.append(max(one - layers * of_layer, 0.0))
            of_token = max((many - one) / layers / (TILED - 1), 0.0)
            token.append(of_token)
            layer.append(max(of_layer - of_token, 0.0))
        latent = [self._latent(bare, threads, began) for threads, began in zip(self.threads, step, strict=True)]
        return bare._replace(
            layer_ns={"grouped": self._sourced(tuple(layer), "models of 12 and 4 layers, less their products"),
                      "latent": self._sourced(tuple(each[0] for each in latent), "a model of 4 layers, less products")},
            token_ns={"grouped": self._sourced(tuple(token), f"steps of {TILED} tokens and of one, less products"),
                      "latent": self._sourced(tuple(each[1] for each in latent), f"steps of {TILED} tokens and of one")},
            step_ns=self._sourced(tuple(step), "a model of 4 layers, less its layers"),
        )  # fmt: skip

    def _latent(self, bare: Kernels, threads: int, step_ns: float) -> tuple[float, float]:
        layers = attention_models()["latent"].layers
        one, many = (self._left("latent", bare, threads, count) - step_ns for count in (1, TILED))
        of_token = max((many - one) / layers / (TILED - 1), 0.0)
        return max(one / layers - of_token, 0.0), of_token

    def _left(self, name: str, bare: Kernels, threads: int, tokens: int) -> float:
        """The time of a step less that of its products and attention."""
        shape = attention_models()[name]
        steps = KernelSteps(shape, WeightBlocks.uniform("q4_0"), bare, bare.place(threads))
        costs = steps.step(tokens, (tokens,))
        experts = shape.experts * float(steps.expert_ns(np.array([float(tokens)]))[0])
        layers = shape.moe_layers * (costs.attention_ns + costs.gate_ns + costs.shared_ns + experts)
        return self.samples[name][Point(threads, 0, tokens)] - layers - costs.dense_ns - costs.head_ns

    def _sourced(self, value: object, how: str) -> Sourced:  # type: ignore[type-arg]
        return Sourced(value, f"{self.where}: {how}", _CONFIDENCE)


def _added(shape: ModelShape, tokens: int) -> tuple[float, float, float]:
    """What ``DEPTH`` tokens more in the cache add to a step: bytes, pairs, and the width of a pair."""
    [(kind, layers)] = shape.attention_counts
    width = 2 * (kind.kv_width if kind.latent else kind.head_dim)
    return layers * DEPTH * kind.kv_width * 2.0, layers * kind.heads * DEPTH * float(tokens), width
