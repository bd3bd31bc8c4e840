"""Small models of random weights from which an engine's kernels are measured: groups that differ in one size.

A step reads more weights than a processor's cache holds, so that weights, keys and values come from memory as in a
large model. A GPU's kernels are over sooner, so that more of them are timed together. All models are written, loaded
and timed, in several rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from realrun.llama_cpp.bench import BenchPoint, BenchSettings, OpenModel, quartiles, time_points
from realrun.llama_cpp.random_gguf import weights_bytes, write_random_gguf
from sim.machine.plausibility import LIMITS
from sim.machine.sourced import Sourced
from traces.models.quantisation import WeightBlocks
from traces.models.shape import ModelShape

BLOCKS = ("q4_0", "q4_k", "q5_0", "q6_k", "q8_0", "mxfp4")
SPLIT_STEPS = {1: 10, 8: 4, 24: 3}  # of models whose experts are with the CPU: tokens of a step that it computes
COPIED_STEPS = {128: 3, 512: 2}  # for which experts are copied to the GPU
FEW_LAYERS = "few-layers"  # a model of attention that is timed with no other tokens in the cache
SPLIT, PINNED = "-split", "-pinned"  # experts with the CPU, in a mapped file and in pinned memory
HOST_THREADS = (1,)  # of models that are on the GPU throughout
_ROOM = 1024  # tokens in the cache behind those of the depth


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
        """The steps of ``attended`` whose attention is computed in tiles."""
        return {tokens: repeats for tokens, repeats in self.attended.items() if tokens >= self.tile_rows.value}

    @property
    def deep(self) -> dict[int, int]:
        """The steps of ``attended`` that are timed with many tokens in the cache: single tokens, and tiles."""
        return {1: self.attended[1], **self.tiled}


ON_CPU = BenchSizes(
    gpu=False, layers=3, depths=(512, 2048, 8192), steps={1: 10, 8: 3, 32: 2, 128: 1}, attended={1: 6, 16: 2, 128: 1},
    rows=(1, 4, 16, 64),
    tile_rows=Sourced(64, "GGML_FA_TILE_Q of ggml-org/llama.cpp ggml/src/ggml-cpu/ops.cpp", "high"),
    most_flops_per_s=LIMITS["cpu.flops_per_s"].high,
)
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
)


def latent_params(hidden: int, heads: int) -> int:
    """Weights of DeepSeek's attention with heads of 128 + 64 and a latent of 512."""
    return hidden * heads * 192 + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden


LATENT = ModelShape(
    name="latent", moe_layers=3, dense_layers=1, experts=32, top_k=4, hidden=2048, expert_width=1024, shared_experts=1,
    shared_width=1024, dense_width=2048, heads=4, kv_heads=4, head_dim=192, kv_width=576,
    attention_params=latent_params(2048, 4), vocab=4096,
)
NARROW = replace(LATENT, name="split", expert_width=256, top_k=16, shared_experts=4)  # as many weights, in more experts
GROUPED = ModelShape(
    name="grouped", moe_layers=3, dense_layers=0, experts=16, top_k=4, hidden=2048, expert_width=1024, heads=16,
    kv_heads=4, head_dim=128, kv_width=1024, vocab=4096,
)


class BenchModel(NamedTuple):
    """A model to be written, how it is loaded, and what is timed on it; ``variant``: ends the name of its samples."""

    name: str
    shape: ModelShape
    architecture: str
    block: str
    points: tuple[tuple[BenchPoint, int], ...]
    settings: BenchSettings
    variant: str = ""

    @property
    def blocks(self) -> WeightBlocks:
        """One for all matrices."""
        return WeightBlocks.uniform(self.block)

    @property
    def samples_name(self) -> str:
        """The name of what is timed on it."""
        return self.name + self.variant


def bench_models(blocks: tuple[str, ...], threads: tuple[int, ...], sizes: BenchSizes = ON_CPU) -> Iterator[BenchModel]:
    """All models of one processor, for these blocks of weights."""
    settings = BenchSettings(_ROOM, gpu=sizes.gpu)
    filled = BenchSettings(max(sizes.depths) + _ROOM, gpu=sizes.gpu, copies=not sizes.gpu)
    for name, (shape, block) in expert_models(blocks, sizes).items():
        yield _model(name, shape, block, _points(threads, sizes.steps), settings)
    for name, shape in attention_models(sizes).items():
        points = list(_points(threads, sizes.attended))
        for depth in sizes.depths if name != FEW_LAYERS else ():
            points += _points(threads[::-1], sizes.deep, depth)  # most threads first: they fill the cache
        yield _model(name, shape, "q4_0", tuple(points), filled)
    for name, shape in router_pair(sizes).items():
        yield _model(name, shape, "q4_0", _points(threads, sizes.attended), settings)


def gpu_models(blocks: tuple[str, ...], threads: tuple[int, ...]) -> Iterator[BenchModel]:
    """All models of a machine with a GPU; ``threads``: of the CPU, for experts that stay there."""
    yield from bench_models(blocks, HOST_THREADS, ON_GPU)
    yield from split_models(blocks, threads)


def split_models(blocks: tuple[str, ...], threads: tuple[int, ...]) -> Iterator[BenchModel]:
    """The models of experts again, on the GPU but for all experts, which stay with the CPU's threads."""
    for name, (shape, block) in expert_models(blocks, ON_GPU, shared=False).items():
        mapped = BenchSettings(_ROOM, gpu=True, cpu_layers=shape.layers)
        copied = _points(threads[-1:], COPIED_STEPS)
        computed = _points(threads, SPLIT_STEPS)
        yield _model(name, shape, block, computed + copied, mapped)._replace(variant=SPLIT)
        yield _model(name, shape, block, copied, mapped._replace(mapped=False))._replace(variant=PINNED)


def measure_samples(
    open_model: OpenModel, folder: Path, models: Sequence[BenchModel], rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[BenchPoint, float]]:
    """Times in ns of every point of the models: the lower quartile of its repeats in a round, since what disturbs a
    measurement makes it longer, and of the rounds the median. Each loads all models anew, so that their caches lie
    elsewhere in memory. Models are written to ``folder``, and stay there.
    """
    paths = [folder / f"{model.name}.gguf" for model in models]
    for model, path in zip(models, paths, strict=True):
        if not path.exists():  # not written for another variant
            progress(f"writing {model.name}")
            write_random_gguf(model.shape, model.architecture, model.blocks, path)
    samples: dict[str, dict[BenchPoint, list[float]]] = {model.samples_name: defaultdict(list) for model in models}
    for turn in range(rounds):
        for model, path in zip(models, paths, strict=True):
            progress(f"round {turn + 1} of {rounds}: {model.samples_name}")
            with open_model(path, model.settings) as context:
                for point, times in time_points(context, model.points).items():
                    samples[model.samples_name][point].append(quartiles(times)[0])
    return {name: {point: median(times) for point, times in of_model.items()} for name, of_model in samples.items()}


def files_bytes(models: Sequence[BenchModel]) -> int:
    """Bytes of the files that ``measure_samples`` writes, one for all variants of a model."""
    files = {model.name: model for model in models}
    return sum(weights_bytes(model.shape, model.architecture, model.blocks) for model in files.values())


def expert_models(
    blocks: tuple[str, ...], sizes: BenchSizes, *, shared: bool = True
) -> dict[str, tuple[ModelShape, str]]:
    """Models for products by their names, each with a block of weights; ``shared``: those of shared experts, too."""
    models = {
        f"{name}-{block}": (shape, block)
        for block in blocks
        for name, shape in product_models(sizes).items() if shared or name != "wide"
    }
    return {**models, NARROW.name: (replace(NARROW, moe_layers=sizes.layers), BLOCKS[0])}


def product_models(sizes: BenchSizes) -> dict[str, ModelShape]:
    """Models that differ in the experts of a token, and in the number of shared experts."""
    few = replace(LATENT, moe_layers=sizes.layers)
    wide = replace(few, shared_experts=12, shared_width=12 * LATENT.expert_width)
    return {"few": few, "many": replace(few, top_k=12), "wide": wide}


def attention_models(sizes: BenchSizes) -> dict[str, ModelShape]:
    """Models that differ in heads, groups and widths of attention, and in their number of layers: nearly all have more
    than those of products, since where in memory a layer's keys come to lie decides how fast they are read."""
    grouped = replace(GROUPED, moe_layers=3 * sizes.layers)
    return {
        "grouped": _attended(grouped), FEW_LAYERS: _attended(replace(grouped, moe_layers=sizes.layers)),
        "many-heads": _attended(replace(grouped, heads=64)),
        "no-groups": _attended(replace(grouped, kv_heads=16, kv_width=4096)),
        "narrow-heads": _attended(replace(grouped, heads=64, kv_heads=8, head_dim=64)),
        "latent": replace(
            LATENT, moe_layers=3 * sizes.layers, heads=16, kv_heads=16, attention_params=latent_params(2048, 16)
        ),
    }


def router_pair(sizes: BenchSizes) -> dict[str, ModelShape]:
    """Models that differ in the rows of their routers alone, but for experts that are not chosen."""
    narrow = replace(_attended(replace(GROUPED, moe_layers=sizes.layers)), expert_width=64)
    return {"few-rows": replace(narrow, experts=64), "many-rows": replace(narrow, experts=512)}


def _attended(shape: ModelShape) -> ModelShape:
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return replace(shape, attention_params=2 * shape.hidden * (wide + narrow))


def _model(
    name: str, shape: ModelShape, block: str, points: tuple[tuple[BenchPoint, int], ...], settings: BenchSettings
) -> BenchModel:
    architecture = "deepseek2" if shape.dense_layers else "qwen3moe"
    return BenchModel(name, shape, architecture, block, points, settings)


def _points(threads: tuple[int, ...], tokens: Mapping[int, int], depth: int = 0) -> tuple[tuple[BenchPoint, int], ...]:
    return tuple((BenchPoint(count, depth, step), repeats) for count in threads for step, repeats in tokens.items())
