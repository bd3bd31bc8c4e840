"""Times of products and of chosen experts from steps of small models, by least squares of relative errors.

A step is ``experts' operations x a time + others' operations x a time + chosen experts x a time + a rest``. The first
two times are those of one block of weights, the others of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from realrun.llama_cpp.bench_engine import BenchPoint
from realrun.llama_cpp.benchmark_models import BenchSizes, expert_models
from sim.costs.kernels import Floats
from traces.models.shape import ExpertWork, ModelShape

Samples = Mapping[str, Mapping[BenchPoint, float]]  # ns, by model
Equations: TypeAlias = tuple[ArrayLike, ArrayLike]  # a matrix [N, U], and its product with the unknowns [U]: times [N]


class ProductTimes(NamedTuple):
    """In ns with each number of threads: of an operation with experts' weights, by ``rows`` of ``BenchSizes``, and with
    others, by its ``steps``, of each block; of an element of a chosen expert's output."""

    experts: Mapping[str, list[list[float]]]
    others: Mapping[str, list[list[float]]]
    chosen: list[float]


def product_times(samples: Samples, blocks: Sequence[str], threads: Sequence[int], sizes: BenchSizes) -> ProductTimes:
    """The times that follow from ``samples``."""
    rows, of_blocks = len(sizes.rows), (len(sizes.rows) + len(sizes.steps)) * len(blocks)
    found = np.array(solved_by_threads(threads, lambda count: _equations(samples, blocks, count, sizes)))
    times = dict(zip(blocks, np.split(found[:, :of_blocks], len(blocks), axis=1), strict=True))
    experts = {block: ns[:, :rows].tolist() for block, ns in times.items()}
    others = {block: ns[:, rows:].tolist() for block, ns in times.items()}
    return ProductTimes(experts, others, found[:, of_blocks].tolist())


def _equations(samples: Samples, blocks: Sequence[str], threads: int, sizes: BenchSizes) -> Equations:
    """Unknowns: those of each block, of experts by ``rows`` and of others by ``steps``; of an element of a chosen
    expert's output; of a step's rest by ``steps``."""
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
    """How near each of ``rows`` is to so many, in parts of 1."""
    place = np.interp(np.log(count), np.log(rows), range(len(rows)))
    near: Floats = np.maximum(1 - np.abs(np.arange(len(rows)) - place), 0.0)
    return near


def solved(
    matrix: ArrayLike, times: ArrayLike, total: Sequence[float] | None = None, least: Sequence[float] | None = None
) -> list[float]:
    """Unknowns of at least ``least``, or 0, by least squares of errors relative to ``total``, or to the times in ns."""
    known, ns = np.array(matrix), np.array(times)
    floor = np.zeros(known.shape[1]) if least is None else np.array(least)
    weights = 1 / np.maximum(ns if total is None else np.array(total, float), 1.0)
    weighted = known * weights[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    found, _ = nnls(weighted / scale, (ns - known @ floor) * weights)
    return [float(each) for each in floor + found / scale]


def solved_by_threads(threads: Sequence[int], equations_of: Callable[[int], Equations]) -> list[list[float]]:
    """The unknowns with each number of threads, of which the first is the smallest: N times as many threads are at most
    N times as fast as these, in everything."""
    first = solved(*equations_of(threads[0]))
    more = [solved(*equations_of(n), least=[ns * threads[0] / n for ns in first]) for n in threads[1:]]
    return [first, *more]
