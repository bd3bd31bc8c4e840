"""Tables of measured times: at their points, between them, and beyond; whole times; and quartiles that are none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.machine.interpolation import (
    DecodeGrid,
    Measured,
    PrefillGrid,
    Table,
    check_quartiles,
    on_line,
    table_ns,
    time_ns,
    whole,
)
from sim.machine.plausibility import HardwareError


@pytest.mark.parametrize(("ns", "as_whole", "as_time"), [
    (0.0, 0, 1), (0.49, 0, 1), (0.5, 1, 1), (1.5, 2, 2), (2.5, 3, 3), (1e9 + 0.4, 10**9, 10**9),
])
def test_halves_go_up_and_a_time_is_at_least_a_nanosecond(ns: float, as_whole: int, as_time: int) -> None:
    assert (whole(ns), time_ns(ns)) == (as_whole, as_time)


def test_a_table_begins_with_no_time_and_never_falls() -> None:
    assert table_ns(np.array([0.0, 5.0, 3.0, 5.5, 0.2])) == (0, 5, 5, 6, 6)
    assert table_ns(np.array([0.0, 0.0])) == (0, 1)


POINTS = st.lists(
    st.tuples(st.integers(1, 1000), st.integers(0, 10**6)), min_size=1, max_size=6, unique_by=lambda point: point[0]
)


@given(POINTS, st.floats(0, 2000))
def test_a_line_goes_through_its_points_and_stays_between_neighbours(points: list[tuple[int, int]], x: float) -> None:
    at, values = zip(*sorted(points), strict=True)
    assert [on_line(at, values, one) for one in at] == pytest.approx(values)
    found = on_line(at, values, x)
    if x <= at[0] or len(at) == 1:
        assert found == values[0]
    elif x >= at[-1]:
        assert found >= values[-1] - 1e-6
    else:
        right = next(place for place, one in enumerate(at) if one > x)
        low, high = sorted(values[right - 1 : right + 1])
        assert low - 1e-6 <= found <= high + 1e-6


def test_beyond_its_last_point_a_table_goes_on_with_its_last_slope_or_level_where_that_falls() -> None:
    assert on_line((1, 2, 4), (10, 20, 30), 8) == 50
    assert on_line((1, 2, 4), (10, 20, 15), 8) == 15
    assert on_line((3,), (10,), 100) == 10


def test_a_grid_has_lines_along_both_sizes() -> None:
    rows = ((10, 30), (30, 70))
    decode = DecodeGrid((1, 3), (100, 200), rows, rows, rows)
    prefill = PrefillGrid((1, 3), (100, 200), rows, rows, rows)
    for grid in (decode, prefill):
        assert (grid(1, 100), grid(1, 150), grid(2, 100), grid(2, 150)) == (10, 20, 20, 35)
        assert grid(5, 300) == 170  # 50 and 110 at 300 tokens, 30 more for each sequence
    assert (decode.length, prefill.length) == ((100, 200), (100, 200))


def test_quartiles_are_about_their_median_and_one_for_each_point() -> None:
    check_quartiles(2, [2, 3], [2, 1], [2, 5])
    with pytest.raises(HardwareError, match="low <= median <= high, got 3, 2, 1"):
        check_quartiles(1, [2], [3], [1])
    with pytest.raises(HardwareError, match=r"expected 2 entries of ns, low and high, .* got 2, 1 and 2"):
        check_quartiles(2, [1, 2], [1], [1, 2])
    for wrong in ((5, 6, 7), (5, 4, 4)):
        with pytest.raises(HardwareError, match="low <= median <= high"):
            Measured(*wrong)
    with pytest.raises(HardwareError, match="expected 2 entries"):
        Table((1, 2), (1,), (1,), (1,))
