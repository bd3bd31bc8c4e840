"""Spread of a time per token: how far the mean of the decode steps that were played is likely off.

Twice the standard error, by leaving out one block of consecutive steps after the other (a jackknife: neighbours are
alike). Two policies are compared step by step, since both play the same routing. What other prompts would add is not
in it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
BLOCKS = 8
_ERRORS = 2


class DecodeSteps(NamedTuple):
    """The time of each decode step that was played, in ms, and the number of tokens that it stands for."""

    ms: Floats
    weights: Floats

    @property
    def mean_ms(self) -> float:
        """TPOT."""
        return _mean(self.ms, self.weights)

    @property
    def spread_ms(self) -> float:
        """Of TPOT; 0 for fewer than two steps."""
        return _spread(self.ms, self.weights)

    def spread_of_difference_ms(self, other: DecodeSteps) -> float:
        """Of the difference from another policy's TPOT over the same steps."""
        return _spread(self.ms - other.ms, self.weights)


def _mean(ms: Floats, weights: Floats) -> float:
    return float((ms * weights).sum() / weights.sum()) if len(ms) else 0.0


def _spread(ms: Floats, weights: Floats) -> float:
    if len(ms) < 2:
        return 0.0
    blocks = np.array_split(np.arange(len(ms)), min(BLOCKS, len(ms)))
    without = np.array([_mean(np.delete(ms, block), np.delete(weights, block)) for block in blocks])
    variance = (len(blocks) - 1) * float(((without - without.mean()) ** 2).mean())
    return float(_ERRORS * variance**0.5)
