"""Spreads: the textbook's standard error where every step is a block, nothing where nothing varies."""

from __future__ import annotations

import numpy as np
import pytest

from trilane.fit.policy_result import BLOCKS, DecodeSteps

MS = np.array([9.0, 11.0, 10.0, 14.0, 8.0, 10.0, 12.0, 10.0])


def steps(ms: np.ndarray, weights: object = 1.0) -> DecodeSteps:
    return DecodeSteps(ms, np.broadcast_to(np.asarray(weights, float), ms.shape))


def test_of_equal_weights_it_is_twice_the_standard_error_of_the_mean() -> None:
    assert len(MS) == BLOCKS
    assert steps(MS).mean_ms == MS.mean()
    assert steps(MS).spread_ms == pytest.approx(2 * MS.std(ddof=1) / np.sqrt(len(MS)))


def test_a_step_that_stands_for_many_tokens_decides_the_mean() -> None:
    assert steps(MS, [1, 1, 1, 9, 1, 1, 1, 1]).mean_ms == pytest.approx((70 + 9 * 14) / 16)


def test_neighbours_that_are_alike_count_as_one() -> None:
    slow = np.repeat(MS, 4)
    assert steps(slow).spread_ms == pytest.approx(steps(MS).spread_ms)


def test_policies_are_compared_step_by_step() -> None:
    assert steps(MS).spread_of_difference_ms(steps(MS + 3)) == pytest.approx(0, abs=1e-12)
    assert steps(MS).spread_of_difference_ms(steps(MS[::-1])) > 0


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_steps_have_none(count: int) -> None:
    assert steps(MS[:count]).spread_ms == 0
