"""The shape of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trilane.testing.strategies import toy_shape


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("phi-3.5-moe", "phi-3.5-moe"),
        ("phi-3.5-moe:8", "phi-3.5-moe"),
        ("qwen3-30b-a3b@q4_k_m:8", "qwen3-30b-a3b@q4_k_m"),  # other bytes, and so another model to a profile
    ],
)
def test_a_model_that_is_cut_keeps_the_name_of_the_whole(name: str, base: str) -> None:
    assert replace(toy_shape(2, 4, 2), name=name).base_name == base
