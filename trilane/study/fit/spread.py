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
        return float(np.average(self.ms, weights=self.weights)) if len(self.ms) else 0.0

    @property
    def spread_ms(self) -> float:
        """Of TPOT; 0 for fewer than two steps."""
        if len(self.ms) < 2:
            return 0.0
        blocks = np.array_split(np.arange(len(self.ms)), min(BLOCKS, len(self.ms)))
        without = [DecodeSteps(*(np.delete(each, block) for each in self)).mean_ms for block in blocks]
        return float(_ERRORS * ((len(blocks) - 1) * np.var(without)) ** 0.5)

    def spread_of_difference_ms(self, other: DecodeSteps) -> float:
        """Of the difference from another policy's TPOT over the same steps."""
        return DecodeSteps(self.ms - other.ms, self.weights).spread_ms
