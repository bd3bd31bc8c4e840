"""Standardised quantiles of a skewed distribution (Tukey's g): the preferences of a layer for its experts."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


def skewed_scores(count: int, tail: float) -> NDArray[np.float64]:
    """``count`` quantiles, ascending, of mean 0 and variance 1: of a normal variate if ``tail`` is 0; above 0 the lower
    end is longer, below 0 the upper (J. W. Tukey's g distribution, mirrored).

    In single precision, and as far as stored fits go, they are those of ``scipy.special.ndtri``, which takes 0.2 s to
    import (but where they are 0: then both are within 1e-15 of it).
    """
    normal = np.array([NormalDist().inv_cdf((place + 0.5) / count) for place in range(count)])
    scores = -np.expm1(-tail * normal) / tail if tail else normal
    return np.asarray((scores - scores.mean()) / max(float(scores.std()), np.finfo(float).tiny))
