"""Repeated measurements on a clock that the tests turn, and their medians and quartiles in tables."""

from __future__ import annotations

import pytest

from realrun.profiling.timing import Effort, Probe, measured_grid, measured_table, measured_time, repeated
from sim.machine.interpolation import DecodeGrid, Measured, Table, whole


class Clock:
    """Counts what the probes take, and notes whose turn it was."""

    def __init__(self) -> None:
        self.ns, self.turns = 0, ""

    def probe(self, name: str, *takes: int) -> Probe:
        """Takes as long as it says, over and over."""
        times = iter(takes * 100)

        def measure() -> dict[tuple[str, ...], list[float]]:
            taken = next(times)
            self.ns += taken
            self.turns += name
            return {(name,): [taken]}

        return measure


def test_the_first_time_is_thrown_away() -> None:
    clock = Clock()
    samples = repeated([clock.probe("a", 900, 1, 2, 3)], Effort(3, 1, 10), lambda: clock.ns)
    assert samples == {("a",): [1, 2, 3]}


def test_probes_take_turns_there_and_back() -> None:
    clock = Clock()
    repeated([clock.probe("a", 1), clock.probe("b", 1)], Effort(rounds=3, most=1, probe_ns=10), lambda: clock.ns)
    assert clock.turns == "ab" + "ab" + "ba" + "ab"


def test_a_quick_probe_is_repeated_a_slow_one_is_not() -> None:
    clock = Clock()
    samples = repeated([clock.probe("a", 4), clock.probe("b", 99)], Effort(2, most=5, probe_ns=10), lambda: clock.ns)
    assert samples == {("a",): [4] * 6, ("b",): [99, 99]}  # 4, 8, 12: enough


def test_no_probe_is_repeated_more_often_than_it_may() -> None:
    clock = Clock()
    samples = repeated([clock.probe("a", 1)], Effort(rounds=2, most=3, probe_ns=10**9), lambda: clock.ns)
    assert len(samples["a",]) == 6


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
