"""Names of models in their parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.models.names import ModelName, parted


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("phi-3.5-moe", ("phi-3.5-moe", None, None)),
        ("phi-3.5-moe@q4_k_m", ("phi-3.5-moe", "q4_k_m", None)),
        ("phi-3.5-moe@q4_k_m:8", ("phi-3.5-moe", "q4_k_m", "8")),
        ("phi-3.5-moe:8@q4_k_m", ("phi-3.5-moe", None, "8@q4_k_m")),
        ("a@b/c:d/config.json@q8_0:2", ("a@b/c:d/config.json", "q8_0", "2")),
        ("mine@home.gguf", ("mine@home.gguf", None, None)),
        ("mine-00001-of-00002.gguf:4", ("mine-00001-of-00002.gguf", None, "4")),
        ("folder@1/model@q8_0", ("folder@1/model", "q8_0", None)),
    ],
)
def test_the_parts_of_a_name(name: str, parts: tuple[str | None, ...]) -> None:
    assert tuple(parted(name)) == parts


@given(st.text())
def test_the_parts_give_the_name_again(name: str) -> None:
    assert str(parted(name)) == name


@given(st.from_regex(r"[a-z0-9.-]{1,9}", fullmatch=True), st.sampled_from([None, "q4_0"]), st.sampled_from([None, "3"]))
def test_a_name_gives_its_parts_again(model: str, weights: str | None, layers: str | None) -> None:
    made = ModelName(model, weights, layers)
    assert parted(str(made)) == made
