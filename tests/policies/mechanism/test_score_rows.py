"""Scores of a layer: the lists of the same numbers, to whoever reads them."""

from __future__ import annotations

import numpy as np
import pytest

from policies.mechanism.score_rows import ScoreRows

STORED = np.array([[0.1, 0.7, 0.2], [0.3, 0.3, 0.4]], np.float16)
ROWS, LISTS = ScoreRows(STORED), STORED.tolist()


def test_it_is_read_like_the_lists() -> None:
    assert [list(ROWS), ROWS[1], ROWS[:1], len(ROWS)] == [LISTS, LISTS[1], LISTS[:1], 2]
    assert type(ROWS[0][0]) is float


def test_it_is_the_array_of_the_lists() -> None:
    for made in (np.asarray(ROWS), np.asarray(ROWS, np.float64)):
        assert made.dtype == np.float64
        np.testing.assert_array_equal(made, np.asarray(LISTS))
    made[0] = 0
    assert ROWS == LISTS


def test_every_half_is_the_number_that_numpy_reads() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    np.testing.assert_array_equal(np.asarray(ScoreRows(halves)), halves.astype(np.float64))
    np.testing.assert_array_equal(np.asarray(ScoreRows(halves[:, ::3])), halves[:, ::3].astype(np.float64))
    assert np.asarray(ScoreRows(halves[:1]), np.float32).dtype == np.float32


@pytest.mark.parametrize("other", [[], [[0.0] * 3] * 2, 5, None])
def test_it_equals_nothing_else(other: object) -> None:
    assert other != ROWS
