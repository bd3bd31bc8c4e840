"""Least squares of relative errors with unknowns of at least 0, alone and for several numbers of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

Equations: TypeAlias = tuple[ArrayLike, ArrayLike]  # a matrix [N, U], and its product with the unknowns [U]: times [N]


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
