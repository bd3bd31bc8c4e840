"""How much experts are liked: the moments and the longer tail, and the very numbers of scipy where traces are made."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtri

from traces.synthesis.latent import skewed_scores
from traces.synthesis.routing_model import stored_models


def test_skewed_scores_have_their_longer_tail_where_they_should() -> None:
    for tail in (-0.5, 0.0, 0.5):
        scores = skewed_scores(101, tail)
        assert (scores.mean(), scores.std()) == (pytest.approx(0, abs=1e-12), pytest.approx(1))
        assert (np.diff(scores) > 0).all()
        assert np.sign((scores**3).mean().round(9)) == -np.sign(tail)
    assert skewed_scores(1, 0.0).tolist() == [0]


@pytest.mark.parametrize("tail", sorted({fit.preference_tail for fit in stored_models().values()}))
def test_in_single_precision_they_are_scipys_quantiles(tail: float) -> None:
    for count in (*range(1, 513, 7), 8, 16, 32, 60, 64, 128, 160, 256, 384, 512):
        normal = ndtri((np.arange(count) + 0.5) / count)
        skewed = -np.expm1(-tail * normal) / tail
        wanted = (skewed - skewed.mean()) / max(float(skewed.std()), np.finfo(float).tiny)
        assert skewed_scores(count, tail).astype(np.float32).tolist() == wanted.astype(np.float32).tolist()
