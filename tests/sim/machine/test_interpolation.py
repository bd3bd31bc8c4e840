"""Tables of measured times: lines between points, and what lies beyond them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.machine.interpolation import Table
from tests.kit.hand_measured import decode_grid, table

THREE = table((2, 100), (4, 140), (8, 160))
FOUR = decode_grid((1, 3), (10, 20), (100, 200), (300, 600))


@pytest.mark.parametrize(
    ("size", "ns"), [(1, 100), (2, 100), (3, 120), (4, 140), (5, 145), (8, 160), (10, 170), (2.5, 110)]
)
def test_lines_between_points_and_on_beyond_the_last(size: float, ns: float) -> None:
    assert THREE(size) == ns


def test_a_last_segment_that_falls_goes_on_level() -> None:
    assert table((1, 50), (2, 90), (4, 70))(100) == 70


def test_one_point_is_level_everywhere() -> None:
    assert [table((4, 70))(size) for size in (1, 4, 400)] == [70, 70, 70]


@pytest.mark.parametrize(("batch", "length", "ns"), [
    (1, 10, 100), (3, 20, 600),  # points
    (1, 15, 150), (2, 10, 200), (2, 15, 300),  # between: 150 and 450 at length 15
    (1, 1, 100), (0.5, 15, 150),  # below
    (1, 30, 300), (5, 10, 500), (5, 30, 1500),  # beyond: 300 and 900 at length 30, 300 a sequence
])
def test_a_grid_is_lines_both_ways(batch: float, length: float, ns: float) -> None:
    assert FOUR(batch, length) == ns


def points(rising: bool) -> st.SearchStrategy[Table]:
    """A table of 1 to 6 points."""
    pairs = st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**12)), min_size=1, max_size=6)

    def made(pairs: list[tuple[int, int]]) -> Table:
        at = tuple(sorted({point for point, _ in pairs}))
        ns = [time for _, time in pairs][: len(at)]
        return table(*zip(at, sorted(ns) if rising else ns, strict=True))

    return pairs.map(made)


@given(points(rising=False))
def test_a_table_hits_its_points(some: Table) -> None:
    assert [some(size) for size in some.at] == list(some.ns)


@given(points(rising=True), st.lists(st.integers(1, 2 * 10**6), min_size=2))
def test_a_rising_table_rises_between_and_beyond_its_points(some: Table, sizes: list[int]) -> None:
    times = [some(size) for size in sorted(sizes)]
    assert times == sorted(times)


@given(points(rising=False), st.integers(1, 2 * 10**6))
def test_nothing_lies_below_the_least_measured_time(some: Table, size: int) -> None:
    assert some(size) >= min(some.ns)
