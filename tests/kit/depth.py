"""How deep the tests go: ``make test`` runs what every change needs, ``make test-deep`` runs everything.

The deep profile draws four times as many examples, plays whole cross products where ``make test`` plays a part of each,
and runs the notebooks and the commands of the pages that take long.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")
DEEP = os.environ.get("TRILANE_TESTS") == "deep"
deep = pytest.mark.skipif(not DEEP, reason="runs in `make test-deep` only")


def examples(count: int) -> int:
    """Examples that a property is tested on: ``count``, four times as many in the deep profile."""
    return 4 * count if DEEP else count


def part_of(cases: Sequence[T], every: int) -> list[T]:
    """One of ``every`` cases; all of them in the deep profile.

    Choose an ``every`` without a common factor with the length of the inner axes of a product: then each value of each
    axis is still played.
    """
    return list(cases) if DEEP else list(cases[::every])
