"""Medians and quartiles of repeated measurements, in tables."""

from __future__ import annotations

import pytest

from realrun.profiling.timing import measured_grid, measured_table, measured_time
from sim.machine.interpolation import DecodeGrid, Measured, Table, whole


def test_medians_and_quartiles_are_whole_half_up() -> None:
    assert measured_time([10, 11]) == Measured(11, 10, 11)  # 10.5, 10.25, 10.75
    assert measured_time([5, 1, 4, 2, 3]) == Measured(3, 2, 4)
    assert whole(2.5) == 3


def test_tables_of_measurements_stand_in_order() -> None:
    assert measured_table({8: [3.0], 1: [1, 2, 3]}) == Table((1, 8), (2, 3), (2, 3), (3, 3))
    rows = ((1, 2), (3, 4))
    found = measured_grid(DecodeGrid, {(4, 16): [4], (4, 8): [3], (1, 8): [1], (1, 16): [2]})
    assert found == DecodeGrid((1, 4), (8, 16), rows, rows, rows)


def test_a_hole_in_the_measurements_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least one measurement"):
        measured_grid(DecodeGrid, {(1, 8): [1], (4, 16): [2]})
