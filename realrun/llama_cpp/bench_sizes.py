"""How large the small models are from which an engine's kernels are measured, and which steps are timed on them: on a
CPU, and on a GPU, whose kernels are over sooner, so that more of them are timed together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trilane.machines.plausibility import LIMITS
from trilane.machines.sourced import Sourced


class BenchSizes(NamedTuple):
    """``gpu``: whether the models are on the GPU; ``layers``: with experts, of models for products, and a third of
    those for attention; ``depths``: tokens in the cache while that is timed; ``steps`` and ``attended``: tokens of a
    step, and how often it is timed in a round, for products and for attention; ``rows``: of an expert, for which its
    rate is sought.
    """

    gpu: bool
    layers: int
    depths: tuple[int, ...]
    steps: Mapping[int, int]
    attended: Mapping[int, int]
    rows: tuple[int, ...]
    tile_rows: Sourced[int]  # tokens of a step from which attention is computed in tiles
    most_flops_per_s: float

    @property
    def tiled(self) -> dict[int, int]:
        """Those of ``attended`` whose attention is computed in tiles."""
        return {tokens: repeats for tokens, repeats in self.attended.items() if tokens >= self.tile_rows.value}

    @property
    def deep(self) -> dict[int, int]:
        """Those that are timed with many tokens in the cache: single tokens, and tiles."""
        return {1: self.attended[1], **self.tiled}


ON_CPU = BenchSizes(
    gpu=False, layers=3, depths=(512, 2048, 8192), steps={1: 10, 8: 3, 32: 2, 128: 1}, attended={1: 6, 16: 2, 128: 1},
    rows=(1, 4, 16, 64),
    tile_rows=Sourced(64, "GGML_FA_TILE_Q of ggml-org/llama.cpp ggml/src/ggml-cpu/ops.cpp", "high"),
    most_flops_per_s=LIMITS["cpu.flops_per_s"].high,
)  # fmt: skip
# A step reads more than the 96 MB of the largest second-level cache of a card. Fewer than 8,192 tokens are in the
# cache: from there on, cards of Ada and later take another kernel for single tokens where more than four heads share
# keys (ggml_cuda_get_best_fattn_kernel, as below).
ON_GPU = BenchSizes(
    gpu=True, layers=6, depths=(6144,), steps={1: 40, 8: 10, 24: 5, 128: 5, 512: 5},
    attended={1: 40, 16: 10, 128: 5, 512: 5}, rows=(1, 4, 16, 64, 192),
    tile_rows=Sourced(
        2, "single tokens have kernels of their own: ggml_cuda_get_best_fattn_kernel of ggml-org/llama.cpp "
        "ggml/src/ggml-cuda/fattn.cu, Turing and later", "medium",
    ),
    most_flops_per_s=LIMITS["gpu.integer_ops_per_s"].high,
)  # fmt: skip
