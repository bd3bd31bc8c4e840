"""Logits of synthetic routers: states of tokens, preferences of texts, and the best few of every row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import ndtri

from traces.synthesis.latent import best, coarse, skewed_scores, token_states
from traces.synthesis.routing_model import stored_models


def streams(*seeds: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in seeds]


def circular(states: np.ndarray, lag: int) -> np.ndarray:
    return (states * np.roll(states, lag, axis=0)).mean(axis=0)


def test_every_text_has_the_autocorrelation_itself() -> None:
    states = token_states(streams(1, 2), [0.5, 0.2], tokens=40, width=3)
    assert states.shape == (2, 40, 3)
    for text in states:
        for lag, wanted in enumerate([1, 0.5, 0.2, 0, 0]):
            assert circular(text, lag) == pytest.approx([wanted] * 3, abs=1e-5)


@given(tokens=st.integers(1, 70), width=st.integers(1, 5), first=st.floats(-0.3, 0.95), seed=st.integers(0, 9))
def test_lengths_and_impossible_autocorrelations_give_variance_one(
    tokens: int, width: int, first: float, seed: int
) -> None:
    states = token_states(streams(seed), [first, first], tokens, width)
    assert states.shape == (1, tokens, width)
    assert (states**2).mean(axis=1)[0] == pytest.approx([1] * width, rel=1e-3)


def test_texts_differ() -> None:
    one, other = token_states(streams(1, 2), [0.5], 30, 1)
    assert not np.allclose(one, other)


@given(tokens=st.integers(1, 40), seeds=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_text_does_not_depend_on_which_others_are_made_with_it(tokens: int, seeds: list[int]) -> None:
    alone = [token_states(streams(seed), [0.5, 0.2], tokens, 3)[0].tolist() for seed in seeds]
    assert token_states(streams(*seeds), [0.5, 0.2], tokens, 3).tolist() == alone


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


ROWS = st.tuples(st.integers(1, 5), st.integers(2, 40))
LOGITS = st.floats(-50, 50, width=32)


@given(arrays(np.float32, ROWS, elements=LOGITS), st.data())
def test_the_best_are_the_largest_in_descending_order(values: np.ndarray, data: st.DataObject) -> None:
    rounded, count = coarse(values), data.draw(st.integers(1, values.shape[1]))
    chosen = np.take_along_axis(rounded, best(values, count).astype(np.intp), axis=1)
    assert chosen.tolist() == np.sort(rounded, axis=1)[:, ::-1][:, :count].tolist()
    assert all(len(set(row)) == count for row in best(values, count).tolist())


def test_rounding_is_fine() -> None:
    values = np.random.default_rng(0).standard_normal((100, 128)).astype(np.float32)
    np.testing.assert_allclose(coarse(values), values, rtol=2e-5)
    assert (best(values, 6) == np.argsort(-values, axis=1)[:, :6]).mean() > 0.999
