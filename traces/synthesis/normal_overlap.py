"""Expected overlap of two top-k choices by correlated scores, in closed form.

"The k best of E" is replaced by a threshold: an expert is chosen if its normal variate exceeds the quantile of k / E.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, owens_t

Floats = NDArray[np.float64]
_GRID = np.linspace(-0.95, 0.9999, 4000)


def overlap_of(correlation: Floats, share: float) -> Floats:
    """P(one is chosen | the other is), for two standard normal variates and ``share`` = k / E of all chosen.

    By Owen's T function: P(X > h, Y > h) = Phi(-h) - 2 T(h, sqrt((1 - r) / (1 + r))); D. B. Owen, Tables for Computing
    Bivariate Normal Probabilities, Annals of Mathematical Statistics 27 (1956).
    """
    threshold = -ndtri(share)
    slope = np.sqrt((1 - correlation) / (1 + correlation))
    return np.asarray((ndtr(-threshold) - 2 * owens_t(threshold, slope)) / share)


def correlation_of(overlap: Floats | float, share: float) -> Floats:
    """The correlation that gives ``overlap``; the inverse of ``overlap_of``, clipped to -0.95 .. 0.9999."""
    return np.asarray(np.interp(overlap, overlap_of(_GRID, share), _GRID))
