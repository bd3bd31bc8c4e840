"""The measured error of a run with few steps is that of the nearest setting."""

from __future__ import annotations

import pytest

from trilane.study.sampling_error import measured_error


@pytest.mark.parametrize(("steps", "batch", "nearest"), [
    (56, 1, (1, 56)), (55, 3, (1, 32)), (24, 4, (4, 24)), (32, 4, (4, 32)), (100, 64, (4, 56)), (8, 1, (1, 24)),
    (1, 16, (4, 24)),
])
def test_the_measured_error_is_that_of_the_nearest_setting_below(
    steps: int, batch: int, nearest: tuple[int, int]
) -> None:
    found = measured_error(steps, batch)
    assert found[:2] == nearest
    assert 0 < found.mean < found.largest < 0.2, "shares of TPOT"
