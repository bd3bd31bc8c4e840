"""Ranges of values in which an idea pays: worked by hand, and against the line through the gains at many values."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilane.study.pays.break_even import GainAt, Range, paying


@pytest.mark.parametrize(("steps", "ranges"), [
    ([(1.0, 0.1), (2.0, 0.2)], [(None, None)]),
    ([(1.0, -0.1), (2.0, -0.2)], []),
    ([(1.0, 0.0), (2.0, 0.0)], []),  # nothing gained
    ([(1.0, -0.1), (2.0, 0.1)], [(1.5, None)]),
    ([(1.0, 0.3), (3.0, -0.1)], [(None, 2.5)]),
    ([(1.0, -0.1), (2.0, 0.1), (3.0, -0.3)], [(1.5, 2.25)]),
    ([(1.0, 0.1), (2.0, 0.0), (3.0, 0.1)], [(None, 2.0), (2.0, None)]),
    ([(1.0, 0.1), (2.0, None), (3.0, 0.1)], [(None, 1.0), (3.0, None)]),  # nothing is known at 2
    ([(1.0, None), (2.0, -0.1), (3.0, 0.1), (4.0, None)], [(2.5, None)]),  # nor at the ends, beyond which none is known
    ([(1.0, 0.1)], [(None, None)]),
    ([(1.0, None)], []),
    ([], []),
], ids=str)
def test_ranges_by_hand(
    steps: list[tuple[float, float | None]], ranges: list[tuple[float | None, float | None]]
) -> None:
    found = paying([GainAt(*step) for step in steps])
    assert [tuple(each) for each in found] == [pytest.approx(each) for each in ranges]


def test_over_a_jump_both_neighbours_are_the_end() -> None:
    steps = [GainAt(1.0, 0.1), GainAt(2.0, -0.1, jumps=True), GainAt(3.0, 0.1, jumps=True)]
    assert paying(steps) == [Range(None, (1.0, 2.0)), Range((2.0, 3.0), None)]
    assert paying([GainAt(1.0, 0.1), GainAt(2.0, 0.2, jumps=True)]) == [Range(None, None)]  # it pays on both sides


GAINS = st.lists(st.sampled_from([-0.4, -0.1, 0.1, 0.3]), min_size=2, max_size=9)


@given(GAINS)
def test_a_value_is_in_a_range_just_where_the_line_through_the_gains_is_above_zero(gains: list[float]) -> None:
    ranges = paying([GainAt(float(place), gain) for place, gain in enumerate(gains)])
    for place, (before, after) in enumerate(pairwise(gains)):
        for share in (0.05, 0.3, 0.45, 0.7, 0.95):
            value, gain = place + share, before + share * (after - before)
            assert any(_holds(each, value) for each in ranges) == (gain > 0), (value, gain, ranges)


def _holds(found: Range, value: float) -> bool:
    low, high = (end if isinstance(end, float) else None for end in found)
    return (low is None or low < value) and (high is None or value < high)


@given(GAINS)
def test_the_ranges_of_reversed_gains_are_the_reversed_ranges(gains: list[float]) -> None:
    forth = paying([GainAt(float(place), gain) for place, gain in enumerate(gains)])
    back = paying([GainAt(float(place), gain) for place, gain in enumerate(reversed(gains))])
    last = len(gains) - 1

    def mirrored(end: object) -> float | None:
        return last - end if isinstance(end, float) else None

    turned = [(mirrored(each.high), mirrored(each.low)) for each in reversed(back)]
    assert [tuple(each) for each in forth] == [pytest.approx(each) for each in turned]
