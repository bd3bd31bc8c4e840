"""Order in which the rows of a window first choose the experts that it misses.

The engine lets the last ones cross the link (``src/core/expert_source.cpp``: ``(nmiss * pcie_num) >> 8`` of them),
which fewer rows chose than those that its pool computes.
"""

from __future__ import annotations

from itertools import accumulate
from math import ceil
from typing import NamedTuple

import numpy as np


class LastShares(NamedTuple):
    """The last of a window's missed experts: as shares of all of them, and of the rows that chose one; from 0 to 1."""

    experts: tuple[float, ...]
    entries: tuple[float, ...]

    def of_entries(self, share: float) -> float:
        """Share of the experts that have so large a share of the entries."""
        return float(np.interp(share, self.entries, self.experts))

    def of_experts(self, share: float) -> float:
        """Share of the entries that so large a share of the experts has."""
        return float(np.interp(share, self.experts, self.entries))


def distinct_share(rows: float, repeated: float) -> float:
    """Distinct experts of a window over its entries."""
    return (1 + (rows - 1) * (1 - repeated)) / rows


def last_shares(rows: float, repeated: float) -> LastShares:
    """Shares of the last missed experts, of a window of so many rows, its last one in part.

    ``repeated`` of a further row's experts were chosen by earlier rows; each of those is as often among them.
    """
    parts = [min(1.0, rows - number) for number in range(ceil(rows))]
    fresh = [part * (1.0 if number == 0 else 1 - repeated) for number, part in enumerate(parts)]
    again = [repeated * part / seen for part, seen in zip(parts[1:], accumulate(fresh), strict=False)]
    chosen = [count * (1 + sum(again[number:])) for number, count in enumerate(fresh)]
    return LastShares(*(tuple(np.cumsum([0.0, *reversed(of)]) / sum(of)) for of in (fresh, chosen)))
