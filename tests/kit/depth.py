"""How deep the tests go: ``make test`` runs what every change needs, ``make test-deep`` runs everything.

The deep profile draws four times as many examples, plays whole cross products where ``make test`` plays a part of each,
and runs the notebooks and the commands of the pages that take long.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest

DEEP = os.environ.get("TRILANE_TESTS") == "deep"
deep = pytest.mark.skipif(not DEEP, reason="runs in `make test-deep` only")


def examples(count: int) -> int:
    """Examples that a property is tested on: ``count``, four times as many in the deep profile."""
    return 4 * count if DEEP else count


def thinned(every: int) -> pytest.MarkDecorator:
    """Thin out the cases of a test: `make test` runs one of ``every``, the deep profile all of them.

    Choose an ``every`` that has no common factor with the lengths of the axes of a product but the slowest: then each
    value of each axis still occurs. (The axis of the uppermost decorator is the fastest.)
    """
    return pytest.mark.thinned(every)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases that are not run, in a profile that is not deep."""
    cases: Counter[str] = Counter()
    left = []
    for item in items:
        mark = item.get_closest_marker("thinned")
        if mark is not None and not DEEP:
            name = item.nodeid.partition("[")[0]
            if cases[name] % mark.args[0]:
                left.append(item)
            cases[name] += 1
    return left
