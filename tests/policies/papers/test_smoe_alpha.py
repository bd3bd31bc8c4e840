"""SMoE's choice of alpha from measured times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.papers.smoe import choose_alpha

GRID = (0.0, 0.1, 0.2, 0.3, 0.4)
LINE = (100.0, 90.0, 80.0, 70.0, 60.0)  # 100 - 100 alpha


@pytest.mark.parametrize(
    ("limit_ms", "alpha", "feasible"),
    [(200.0, 0.0, True), (100.0, 0.0, True), (75.0, 0.25, True), (60.01, 0.4, True), (59.0, 0.4, False)],
)
def test_the_least_alpha_that_is_fast_enough(limit_ms: float, alpha: float, feasible: bool) -> None:
    choice = choose_alpha(GRID, LINE, limit_ms)
    assert choice.alpha == pytest.approx(alpha, abs=0.0005)
    assert choice.tpot_ms == pytest.approx(100 - 100 * alpha, abs=0.05)
    assert choice.feasible is feasible


def test_noise_is_fitted_over() -> None:
    noisy = (100.0, 94.0, 76.0, 74.0, 56.0)  # least squares: 80 - 108 (alpha - 0.2)
    assert choose_alpha(GRID, noisy, 90.8).alpha == pytest.approx(0.1, abs=0.0005)
    assert choose_alpha(GRID, noisy, 69.2).alpha == pytest.approx(0.3, abs=0.0005)


def test_a_curve_is_fitted_by_degree_2() -> None:
    curve = [100 - 200 * a + 250 * a * a for a in GRID]  # falls to 60 at 0.4
    assert choose_alpha(GRID, curve, 70.0, degree=2).alpha == pytest.approx(0.2, abs=0.0005)


@pytest.mark.parametrize(
    ("alphas", "times", "degree"),
    [((0.1,), (5.0,), 1), ((0.1, 0.2), (5.0, 4.0), 2), (GRID, LINE, 3), (GRID, (1.0,), 1)],
)
def test_too_little_is_refused(alphas: Sequence[float], times: Sequence[float], degree: int) -> None:
    with pytest.raises(ValueError, match="choice of alpha: expected degree 1 or 2"):
        choose_alpha(alphas, times, 1.0, degree)
