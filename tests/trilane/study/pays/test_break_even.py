"""Where an idea begins to pay along a line of a map, by hand."""

from __future__ import annotations

import pytest

from trilane.study.pays.words import Range, paying


@pytest.mark.parametrize(
    ("gains", "ranges"),
    [
        ([1.0, 1.0, 1.0], [Range(None, None)]),
        ([-1.0, 0.0, -1.0], []),
        ([-1.0, 1.0, 1.0], [Range(15.0, None)]),
        ([3.0, -1.0, -1.0], [Range(None, 17.5)]),
        ([-1.0, 1.0, -3.0], [Range(15.0, 22.5)]),
        ([1.0, -1.0, 1.0], [Range(None, 15.0), Range(25.0, None)]),
        ([-1.0, None, 1.0], [Range(30.0, None)]),
        ([1.0, None, -1.0], [Range(None, 10.0)]),
        ([1.0, None, 1.0], [Range(None, 10.0), Range(30.0, None)]),
        ([None, 1.0, 1.0], [Range(None, None)]),
        ([None, -1.0, 1.0], [Range(25.0, None)]),
        ([1.0, -1.0, None], [Range(None, 15.0)]),
        ([None, None, None], []),
    ],
)
def test_lines_between_values_cross_the_break_even_where_a_gain_is_nothing(
    gains: list[float | None], ranges: list[Range]
) -> None:
    assert paying(list(zip([10.0, 20.0, 30.0], gains, strict=True)), 0.0) == ranges


def test_no_line_is_drawn_across_a_value_that_cannot_run() -> None:
    gains = [-1.0, None, 1.0, None, -1.0]
    assert paying(list(zip([10.0, 20.0, 30.0, 40.0, 50.0], gains, strict=True)), 0.0) == [Range(30.0, 30.0)]


def test_what_must_be_bought_pays_from_a_gain_on() -> None:
    assert paying(list(zip([10.0, 20.0], [0.0, 0.1], strict=True)), 0.05) == [Range(15.0, None)]
    assert paying(list(zip([10.0, 20.0], [0.0, 0.05], strict=True)), 0.05) == []
