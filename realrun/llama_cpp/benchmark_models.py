"""Small models of random weights from which an engine's kernels are measured: pairs that differ in one size.

All experts of the pairs for products are chosen by every token, so that an expert has exactly as many rows as a step
has tokens; together they are larger than a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from realrun.llama_cpp.bench_engine import Point
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape

BLOCKS = ("q4_0", "q4_k", "q5_0", "q6_k", "q8_0", "mxfp4")
ROWS = {1: 12, 2: 5, 4: 5, 16: 4, 64: 2, 256: 1}  # of a step, and how often it is timed
DEPTH = 2048
TILED = 128  # tokens, more than the rows of a tile
UNTILED = 16
_ATTENDED = {1: 12, UNTILED: 3, TILED: 2}
_ROUTED = {1: 12, UNTILED: 5, TILED: 2}

LATENT = ModelShape(
    name="latent", moe_layers=3, dense_layers=1, experts=4, top_k=4, hidden=2048, expert_width=1024, shared_experts=1,
    shared_width=1024, dense_width=2048, heads=4, kv_heads=4, head_dim=192, kv_width=576, vocab=4096,
)  # fmt: skip
GROUPED = ModelShape(
    name="grouped", moe_layers=4, dense_layers=0, experts=4, top_k=4, hidden=2048, expert_width=256, heads=16,
    kv_heads=4, head_dim=128, kv_width=1024, vocab=4096,
)  # fmt: skip


class BenchModel(NamedTuple):
    """A model to be written, and what is timed on it."""

    name: str
    shape: ModelShape
    architecture: str
    block: str
    points: tuple[tuple[Point, int], ...]

    @property
    def blocks(self) -> WeightBlocks:
        """One for all matrices."""
        return WeightBlocks.uniform(self.block)


def bench_models(blocks: tuple[str, ...], threads: tuple[int, ...]) -> Iterator[BenchModel]:
    """All of them, for these blocks of weights."""
    for block in blocks:
        for name, shape in product_pairs().items():
            yield _model(f"{name}-{block}", shape, block, _points(threads, ROWS))
    for name, shape in attention_models().items():
        yield _model(name, shape, "q4_0", (*_points(threads, _ATTENDED), *_points(threads, _ATTENDED, DEPTH)))
    for name, shape in router_pair().items():
        yield _model(name, shape, "q4_0", _points(threads, _ROUTED))


def product_pairs() -> dict[str, ModelShape]:
    """Models that differ in their number of experts, and in the width of a dense layer."""
    return {"few": LATENT, "many": replace(LATENT, experts=12, top_k=12), "wide": replace(LATENT, dense_width=26624)}


def attention_models() -> dict[str, ModelShape]:
    """Models that differ in heads, groups and widths of attention, and in their number of layers."""
    return {
        "grouped": _attended(GROUPED), "deep": _attended(replace(GROUPED, moe_layers=12)),
        "many-heads": _attended(replace(GROUPED, heads=64)),
        "no-groups": _attended(replace(GROUPED, kv_heads=16, kv_width=4096)),
        "narrow-heads": _attended(replace(GROUPED, heads=64, kv_heads=8, head_dim=64)),
        "latent": replace(LATENT, heads=16, kv_heads=16, attention_params=latent_params(2048, 16)),
    }  # fmt: skip


def router_pair() -> dict[str, ModelShape]:
    """Models that differ in the rows of their routers alone, but for experts that are not chosen."""
    narrow = replace(_attended(GROUPED), expert_width=64)
    return {"few-rows": replace(narrow, experts=64), "many-rows": replace(narrow, experts=512)}


def latent_params(hidden: int, heads: int) -> int:
    """Weights of DeepSeek's attention with heads of 128 + 64 and a latent of 512."""
    return hidden * heads * 192 + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden


def _attended(shape: ModelShape) -> ModelShape:
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return replace(shape, attention_params=2 * shape.hidden * (wide + narrow))


def _model(name: str, shape: ModelShape, block: str, points: tuple[tuple[Point, int], ...]) -> BenchModel:
    return BenchModel(name, shape, "deepseek2" if shape.dense_layers else "qwen3moe", block, points)


def _points(threads: tuple[int, ...], tokens: dict[int, int], depth: int = 0) -> tuple[tuple[Point, int], ...]:
    return tuple((Point(count, depth, each), repeats) for count in threads for each, repeats in tokens.items())
