"""Standings by hand."""

from __future__ import annotations

import pytest

from tests.kit.leaderboard_entries import entries_of, some_entries
from trilane.study.leaderboard.standings import standings


def test_speeds_are_compared_with_the_fastest_that_keeps_the_routing() -> None:
    found = {one.policy: one for one in standings(some_entries())}
    assert list(found["steady"].relative.values()) == [1.0, 1.0, 0.5]
    assert list(found["quick"].relative.values()) == [0.5, 1.0]
    assert list(found["wild"].relative.values()) == [2.0, 2.0, 1.0]
    assert found["steady"].score == pytest.approx(0.5 ** (1 / 3))
    assert (found["steady"].lowest, found["steady"].best_in) == (0.5, 2)
    assert (found["never"].score, found["never"].lowest, found["never"].best_in) == (None, None, 0)


def test_those_that_run_everywhere_come_first() -> None:
    assert [one.policy for one in standings(some_entries())] == ["wild", "steady", "quick", "never"]


def test_a_tie_is_best_as_well() -> None:
    found = {one.policy: one for one in standings([*entries_of("a", 100.0), *entries_of("b", 98.5)])}
    assert (found["a"].best_in, found["b"].best_in) == (1, 1)
