"""SMoE's choice of alpha (Section V-C, Eq. 5): the least substitution that meets a limit on the time per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from policies.system import ChoiceError

_STEPS = 1000  # of the one-dimensional search over the measured range


class AlphaChoice(NamedTuple):
    """The alpha to use, the time that is expected with it, and whether that meets the limit."""

    alpha: float
    tpot_ms: float
    feasible: bool


def choose_alpha(alphas: Sequence[float], tpots_ms: Sequence[float], limit_ms: float, degree: int = 1) -> AlphaChoice:
    """Fit a polynomial of ``degree`` (the paper: low; here 1 or 2) to times measured at ``alphas``, and take the least
    alpha of the measured range whose fitted time is at most ``limit_ms``; the largest, not feasible, if none is.

    The paper assumes that quality only falls with alpha, which its own Table IV does not always show: judge the answer
    by the model's quality. Raises ChoiceError for too few measurements, or another degree.
    """
    if degree not in (1, 2) or len(set(alphas)) <= degree or len(alphas) != len(tpots_ms):
        raise ChoiceError(
            f"choice of alpha: expected degree 1 or 2 and more alphas than that, each with a time, "
            f"got degree {degree}, {len(set(alphas))} alphas and {len(tpots_ms)} times"
        )
    fit = np.polynomial.Polynomial.fit(alphas, tpots_ms, degree)
    grid = np.linspace(min(alphas), max(alphas), _STEPS + 1)
    times = fit(grid)
    fast_enough = np.flatnonzero(times <= limit_ms)
    chosen = int(fast_enough[0]) if len(fast_enough) else _STEPS
    return AlphaChoice(float(grid[chosen]), float(times[chosen]), len(fast_enough) > 0)
