"""Popularity by calibration, and what stands in where nothing was decoded."""

from __future__ import annotations

import numpy as np

from policies.calibration import Calibration

PROMPT = np.array([[[3, 1]], [[2, 2]]])


def counted(decoded: np.ndarray) -> Calibration:
    return Calibration("hand", PROMPT + decoded, decoded, np.zeros((0, 1, 1), np.int16))


def test_decode_popularity_is_of_decode_tokens() -> None:
    found = counted(np.array([[[0, 1]], [[0, 3]]]))
    assert found.decode_popularity.tolist() == [[0, 1]]
    assert found.popularity.tolist() == [[5 / 12, 7 / 12]]


def test_without_decode_tokens_those_of_the_prompts_count() -> None:
    found = counted(np.zeros_like(PROMPT))
    assert found.decode_popularity.tolist() == found.popularity.tolist() == [[5 / 8, 3 / 8]]


def test_a_layer_of_one_pair_is_all_its_expert_s_and_one_without_any_nobody_s() -> None:
    counts = np.array([[[0, 1], [0, 0]]])
    found = Calibration("hand", counts, counts, np.zeros((0, 2, 1), np.int16))
    assert found.popularity.tolist() == [[0, 1], [0, 0]]
