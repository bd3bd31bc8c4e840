"""Small models of random weights from which an engine's kernels are measured: groups that differ in one size.

A step reads more weights than a CPU's cache holds, so that weights, keys and values come from memory as in a large
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from realrun.llama_cpp.bench_engine import BenchPoint
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape

BLOCKS = ("q4_0", "q4_k", "q5_0", "q6_k", "q8_0", "mxfp4")
PASSES = 2  # over all points of a model, so that a short disturbance spoils no point
STEPS = {1: 10, 8: 3, 32: 2, 128: 1}  # tokens of a step, and how often it is timed in a pass
ROWS = (1, 4, 16, 64)  # of an expert, for which its rate is sought
DEPTH = 2048
TILED = 128  # tokens, more than the rows of a tile
UNTILED = 16
_ATTENDED = {1: 6, UNTILED: 2, TILED: 1}


def latent_params(hidden: int, heads: int) -> int:
    """Weights of DeepSeek's attention with heads of 128 + 64 and a latent of 512."""
    return hidden * heads * 192 + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden


LATENT = ModelShape(
    name="latent", moe_layers=3, dense_layers=1, experts=32, top_k=4, hidden=2048, expert_width=1024, shared_experts=1,
    shared_width=1024, dense_width=2048, heads=4, kv_heads=4, head_dim=192, kv_width=576,
    attention_params=latent_params(2048, 4), vocab=4096,
)  # fmt: skip
SPLIT = replace(LATENT, name="split", expert_width=256, top_k=16, shared_experts=4)  # as many weights, in more experts
GROUPED = ModelShape(
    name="grouped", moe_layers=3, dense_layers=0, experts=16, top_k=4, hidden=2048, expert_width=1024, heads=16,
    kv_heads=4, head_dim=128, kv_width=1024, vocab=4096,
)  # fmt: skip


class BenchModel(NamedTuple):
    """A model to be written, and what is timed on it."""

    name: str
    shape: ModelShape
    architecture: str
    block: str
    points: tuple[tuple[BenchPoint, int], ...]

    @property
    def blocks(self) -> WeightBlocks:
        """One for all matrices."""
        return WeightBlocks.uniform(self.block)


def bench_models(blocks: tuple[str, ...], threads: tuple[int, ...]) -> Iterator[BenchModel]:
    """All of them, for these blocks of weights."""
    for block in blocks:
        for name, shape in product_models().items():
            yield _model(f"{name}-{block}", shape, block, _points(threads, STEPS))
    yield _model("split", SPLIT, "q4_0", _points(threads, STEPS))
    for name, shape in attention_models().items():
        points = _points(threads, _ATTENDED)
        if name != "deep":
            points += _points(threads[::-1], _ATTENDED, DEPTH)  # most threads first: they fill the cache
        yield _model(name, shape, "q4_0", points)
    for name, shape in router_pair().items():
        yield _model(name, shape, "q4_0", _points(threads, _ATTENDED))


def product_models() -> dict[str, ModelShape]:
    """Models that differ in the experts of a token, and in the number of shared experts."""
    wide = replace(LATENT, shared_experts=12, shared_width=12 * LATENT.expert_width)
    return {"few": LATENT, "many": replace(LATENT, top_k=12), "wide": wide}


def attention_models() -> dict[str, ModelShape]:
    """Models that differ in heads, groups and widths of attention, and in their number of layers."""
    return {
        "grouped": _attended(GROUPED), "deep": _attended(replace(GROUPED, moe_layers=9)),
        "many-heads": _attended(replace(GROUPED, heads=64)),
        "no-groups": _attended(replace(GROUPED, kv_heads=16, kv_width=4096)),
        "narrow-heads": _attended(replace(GROUPED, heads=64, kv_heads=8, head_dim=64)),
        "latent": replace(LATENT, heads=16, kv_heads=16, attention_params=latent_params(2048, 16)),
    }  # fmt: skip


def router_pair() -> dict[str, ModelShape]:
    """Models that differ in the rows of their routers alone, but for experts that are not chosen."""
    narrow = replace(_attended(GROUPED), expert_width=64)
    return {"few-rows": replace(narrow, experts=64), "many-rows": replace(narrow, experts=512)}


def _attended(shape: ModelShape) -> ModelShape:
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return replace(shape, attention_params=2 * shape.hidden * (wide + narrow))


def _model(name: str, shape: ModelShape, block: str, points: tuple[tuple[BenchPoint, int], ...]) -> BenchModel:
    return BenchModel(name, shape, "deepseek2" if shape.dense_layers else "qwen3moe", block, points * PASSES)


def _points(threads: tuple[int, ...], tokens: dict[int, int], depth: int = 0) -> tuple[tuple[BenchPoint, int], ...]:
    return tuple((BenchPoint(count, depth, each), repeats) for count in threads for each, repeats in tokens.items())
