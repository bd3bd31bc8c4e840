"""The shape of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traces.models.shape import ShapeError
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


def test_a_quantised_file_gives_the_size_of_an_expert_in_every_layer() -> None:
    shape = toy_shape(2, 4, 2)
    assert replace(shape, expert_bytes=(70, 50)).routed_bytes == 4 * (70 + 50)
    for sizes in ((70,), (70, 50, 30)):
        with pytest.raises(ShapeError, match=f"an entry for each of the 2 MoE layers, got {len(sizes)}"):
            replace(shape, expert_bytes=sizes)
