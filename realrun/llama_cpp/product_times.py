"""Times of products and of chosen experts from steps of small models, by least squares of relative errors.

A step is ``experts' operations x a time + others' operations x a time + chosen experts x a time + a rest``. The first
two times are those of one block of weights, the others of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from realrun.llama_cpp.bench_engine import BenchPoint
from realrun.llama_cpp.benchmark_models import BLOCKS, ROWS, SPLIT, STEPS, product_models
from realrun.llama_cpp.expert_work import ExpertWork
from realrun.llama_cpp.nonnegative_fit import Equations, solved_by_threads
from sim.costs.kernels import Floats
from traces.models.shape import ModelShape

Samples = Mapping[str, Mapping[BenchPoint, float]]  # ns, by model


class ProductTimes(NamedTuple):
    """In ns: of an operation with experts' weights, by ``ROWS``, and with others, by ``STEPS``, of each block; of an
    element of a chosen expert's output."""

    blocks: Mapping[str, tuple[list[float], list[float]]]
    chosen: float


def product_times(samples: Samples, blocks: Sequence[str], threads: Sequence[int]) -> list[ProductTimes]:
    """The times that follow from ``samples`` with each number of threads."""
    width = len(ROWS) + len(STEPS)
    found = solved_by_threads(threads, lambda count: _equations(samples, blocks, count))
    return [
        ProductTimes(
            {block: _of_block(times[place * width : (place + 1) * width]) for place, block in enumerate(blocks)},
            times[width * len(blocks)],
        )
        for times in found
    ]


def _of_block(times: list[float]) -> tuple[list[float], list[float]]:
    return times[: len(ROWS)], times[len(ROWS) :]


def _equations(samples: Samples, blocks: Sequence[str], threads: int) -> Equations:
    """Unknowns: those of each block, of experts by ``ROWS`` and of others by ``STEPS``; of an element of a chosen
    expert's output; of a step's rest by ``STEPS``."""
    width = len(ROWS) + len(STEPS)
    matrix, times = [], []
    for place, block in enumerate(blocks):
        for name, shape in _models_of(block).items():
            for step, tokens in enumerate(STEPS):
                equation = np.zeros(width * len(blocks) + 1 + len(STEPS))
                of_block, rest = equation[place * width :], equation[width * len(blocks) :]
                of_block[: len(ROWS)], of_tokens, of_one = _operations(shape, tokens)
                of_block[len(ROWS) + step] += of_tokens
                of_block[len(ROWS)] += of_one
                rest[0], rest[1 + step] = _chosen_elements(shape, tokens), 1.0
                matrix.append(equation)
                times.append(samples[name][BenchPoint(threads, 0, tokens)])
    return Equations(np.array(matrix), np.array(times))


def _models_of(block: str) -> dict[str, ModelShape]:
    """The models for products of a block, by their names."""
    found = {f"{name}-{block}": shape for name, shape in product_models().items()}
    return {**found, SPLIT.name: SPLIT} if block == BLOCKS[0] else found


def _operations(shape: ModelShape, tokens: int) -> tuple[Floats, float, float]:
    """Operations of a step with experts' weights, shared out among ``ROWS``, and with others, those of all tokens and
    those of one: the head, and what follows the attention of the last layer.
    """
    expert = 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width
    experts = np.zeros(len(ROWS))
    for layers, count in ((shape.moe_layers - 1, tokens), (1, 1)):
        work = ExpertWork.of(shape, count)
        experts += layers * work.active * work.rows * expert * _near_rows(work.rows)
    every = shape.layers * shape.attention_params + shape.dense_layers * shape.dense_ffn_params
    of_tokens = 2.0 * tokens * (every + (shape.moe_layers - 1) * shape.shared_params)
    return experts, of_tokens, 2.0 * (shape.shared_params + shape.vocab * shape.hidden)


def _chosen_elements(shape: ModelShape, tokens: int) -> float:
    """Elements of the outputs of all experts that a step's tokens choose."""
    return ((shape.moe_layers - 1) * tokens + 1) * shape.top_k * shape.hidden


def _near_rows(rows: float) -> Floats:
    """How near each of ``ROWS`` is, in parts of 1."""
    place = np.interp(np.log(rows), np.log(ROWS), range(len(ROWS)))
    near: Floats = np.maximum(1 - np.abs(np.arange(len(ROWS)) - place), 0.0)
    return near
