"""The closed form of an overlap, against counting."""

from __future__ import annotations

import numpy as np
import pytest

from traces.synthesis.estimate import correlation_of, overlap_of


@pytest.mark.parametrize("correlation", [-0.3, 0.0, 0.4, 0.9])
def test_the_closed_form_is_what_one_counts(correlation: float) -> None:
    rng = np.random.default_rng(0)
    one, fresh = rng.standard_normal((2, 400_000))
    other = correlation * one + np.sqrt(1 - correlation**2) * fresh
    threshold = 1.2815515655446004  # of the best tenth
    counted = ((one > threshold) & (other > threshold)).sum() / (one > threshold).sum()
    assert overlap_of(np.array(correlation), 0.1) == pytest.approx(counted, abs=0.01)


def test_no_correlation_is_chance_and_the_inverse_inverts() -> None:
    assert overlap_of(np.array(0.0), 0.1) == pytest.approx(0.1)
    correlations = np.array([-0.2, 0.1, 0.5, 0.95])
    assert correlation_of(overlap_of(correlations, 0.05), 0.05) == pytest.approx(correlations, abs=1e-3)
