"""States of tokens: random, and each text's autocorrelation is as asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.synthesis.latent import token_states


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
