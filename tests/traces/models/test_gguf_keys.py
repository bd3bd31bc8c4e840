"""Values of a GGUF file's metadata by key: of a model, of a layer, within bounds, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from traces.models.gguf_reader import GgufKeys
from traces.models.shape import ShapeError


def keys(**values: Any) -> GgufKeys:
    """Of the architecture ``toy``."""
    named = {f"toy.{key}": value for key, value in values.items()}
    return GgufKeys({"general.architecture": "toy", **named}, "a.gguf")


def test_keys_begin_with_the_architecture() -> None:
    found = keys(expert_count=8)
    assert found.architecture == "toy"
    assert "expert_count" in found
    assert "general.architecture" not in found
    assert GgufKeys({}, "a.gguf").architecture == ""


@pytest.mark.parametrize(
    ("value", "layer", "default", "least", "expected"),
    [
        (8, 0, None, 0, 8), (8, 5, None, 8, 8), ((4, 6), 0, None, 0, 4), ((4, 6), 1, None, 0, 6), (0, 0, 3, 0, 0),
        (10**9, 0, None, 0, 10**9),
    ],
)
def test_a_count_is_that_of_the_model_or_of_the_layer(
    value: object, layer: int, default: int | None, least: int, expected: int
) -> None:
    assert keys(size=value).count("size", layer, default, least) == expected


def test_without_the_key_a_count_is_the_default() -> None:
    assert keys().count("size", default=3) == 3


@pytest.mark.parametrize(
    ("value", "layer", "least"),
    [(None, 0, 0), (-1, 0, 0), (7, 0, 8), (10**9 + 1, 0, 0), (2.0, 0, 0), (True, 0, 0), ("8", 0, 0), ((4, 6), 2, 0),
     ((), 0, 0), ((4, -6), 1, 0)],
)
def test_any_other_count_is_refused(value: object, layer: int, least: int) -> None:
    """A list that ends before the layer has no value for it."""
    with pytest.raises(ShapeError, match=f"a.gguf: expected a whole number from {least} at the key 'toy.size', got "):
        keys(size=value).count("size", layer, least=least)


def test_layers_are_1_to_1000_without_those_that_predict_several_tokens() -> None:
    assert keys(block_count=1).layers == 1
    assert keys(block_count=1003, nextn_predict_layers=3).layers == 1000
    for values in ({"block_count": 0}, {"block_count": 1001}, {"block_count": 2, "nextn_predict_layers": 2}):
        with pytest.raises(ShapeError, match=r"a\.gguf: block_count: expected 1 to 1000 layers, got "):
            _ = keys(**values).layers


@pytest.mark.parametrize(
    ("value", "layer", "default", "expected"),
    [(True, 0, False, True), (0, 0, True, False), ((False, True), 1, False, True), ((False, True), 2, True, True),
     ((False, True), 2, False, False)],
)
def test_a_flag_is_that_of_the_layer_or_the_default(value: object, layer: int, default: bool, expected: bool) -> None:
    assert keys(gated=value).flag("gated", layer, default) is expected


def test_without_the_key_a_flag_is_not_set() -> None:
    assert keys().flag("gated") is False
    assert keys().flag("gated", default=True) is True


def test_only_a_list_has_a_value_for_each_layer() -> None:
    assert [keys(size=value).is_list("size") for value in ((4, 6), 4)] == [True, False]
    assert not keys().is_list("size")
