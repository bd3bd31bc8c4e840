"""A number that is measured several times and predicted once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Repeated:
    """One number of a run: as measured in each repeat, and as predicted."""

    measured: tuple[float, ...]
    predicted: float

    @property
    def median(self) -> float:
        return float(np.median(self.measured))

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the repeats, interpolated."""
        low, high = np.percentile(self.measured, [25, 75])
        return float(low), float(high)

    @property
    def half_iqr(self) -> float | None:
        """Half the interquartile range of the repeats; None for a single one, which has no spread."""
        low, high = self.quartiles
        return (high - low) / 2 if len(self.measured) > 1 else None

    @property
    def spread(self) -> float | None:
        """The noise floor for judging an error: half the interquartile range over the median."""
        return None if self.half_iqr is None or not self.median else self.half_iqr / self.median

    @property
    def difference(self) -> float:
        """Predicted - measured, in the number's own unit."""
        return self.predicted - self.median

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None if the measured value is 0."""
        return self.predicted / self.median - 1 if self.median else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every repeat, and the statistics."""
        low, high = self.quartiles
        return {
            "repeats": list(self.measured), "median": self.median, "lowest": min(self.measured),
            "highest": max(self.measured), "first_quartile": low, "third_quartile": high, "spread": self.spread,
            "predicted": self.predicted, "error": self.error,
        }  # fmt: skip
