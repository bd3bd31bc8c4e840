"""Least squares of relative errors with unknowns of at least 0, alone and for several numbers of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from sim.costs.kernels import Floats


class Equations(NamedTuple):
    """``matrix`` [N, U] x unknowns [U] = ``times`` [N], in ns."""

    matrix: Floats
    times: Floats


def solved(
    equations: Equations, total: Sequence[float] | None = None, least: Sequence[float] | None = None
) -> list[float]:
    """Unknowns of at least ``least``, or 0, by least squares of errors relative to ``total``, or to the times."""
    floor = np.zeros(equations.matrix.shape[1]) if least is None else np.array(least)
    weights = 1 / np.maximum(equations.times if total is None else np.array(total, float), 1.0)
    matrix = equations.matrix * weights[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    found, _ = nnls(matrix / scale, (equations.times - equations.matrix @ floor) * weights)
    return [float(each) for each in floor + found / scale]


def solved_by_threads(threads: Sequence[int], equations_of: Callable[[int], Equations]) -> list[list[float]]:
    """The unknowns with each number of threads, of which the first is the smallest: N times as many threads are at most
    N times as fast as these, in everything."""
    first = solved(equations_of(threads[0]))
    more = [[ns * threads[0] / count for ns in first] for count in threads[1:]]
    return [first, *(solved(equations_of(count), least=low) for count, low in zip(threads[1:], more, strict=True))]
