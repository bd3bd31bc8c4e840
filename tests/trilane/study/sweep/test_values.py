"""Values of an axis as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.values import distinct, values_in, values_of


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("batch", "1,4,16", (1, 4, 16)),
        ("batch", "4", (4,)),
        ("batch", "1..16", (1, 2, 4, 8, 16)),
        ("batch", "3..12", (3, 4, 8, 12)),
        ("batch", "1..16/3", (1, 4, 16)),
        ("pcie_gbps", "8..64/4", (8, 16.0, 32.0, 64)),
        ("pcie_gbps", "8..64", (8, 10.8, 14.5, 19.5, 26.3, 35.3, 47.6, 64)),
        ("pcie_gbps", " 8 .. 64 / 2 ", (8, 64)),
        ("cached_share", "0..1/5", (0, 0.25, 0.5, 0.75, 1)),
        ("cached_share", "0.1..0.9/5", (0.1, 0.3, 0.5, 0.7, 0.9)),
        ("gpu_memory_gb", "12,24.5", (12, 24.5)),
        ("link.h2d_bytes_per_s", "8e9,16.0e+9", (8e9, 16e9)),
        ("link.copies", "pinned,pageable", ("pinned", "pageable")),
        ("parameters.window", "1..8", (1, 2, 4, 8)),
        ("parameters.lookahead", "1..3", (1, 2, 3)),
        ("parameters.alpha", "0..1/11", (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)),
        ("parameters.alpha", "1..4/4", (1, 2, 3, 4)),
        ("parameters.margin", "1..2/3", (1, 1.5, 2)),
        ("parameters.pool", "true,false", (True, False)),
        ("noisy_forecast_recall", "0.5..1/6", (0.5, 0.6, 0.7, 0.8, 0.9, 1)),
        ("sequences", "0..3", (0, 1, 2, 3)),
        ("policy", "dali, fiddler", ("dali", "fiddler")),
        ("pcie", "3x16,4x16", ("3x16", "4x16")),
        ("model", "null", (None,)),
        ("seed", "0..3", (0, 1, 2, 3)),
        ("batch", "2,2,4,2", (2, 4)),
    ],
)
def test_a_text_names_values(name: str, text: str, values: tuple[Any, ...]) -> None:
    assert values_in(name, text) == values


@pytest.mark.parametrize(
    ("name", "given", "values"),
    [
        ("batch", 4, (4,)),
        ("batch", [4, 1], (4, 1)),
        ("batch", "1..4", (1, 2, 4)),
        ("policy", [{"dali": {"window": 2}}, "fiddler"], ({"dali": {"window": 2}}, "fiddler")),
        ("link.h2d_bytes_per_s", ["25e9"], (25e9,)),  # text to YAML 1.1
        ("trace", "../a..b.safetensors", ("../a..b.safetensors",)),
        ("model", None, (None,)),
    ],
)
def test_a_file_names_values(name: str, given: object, values: tuple[Any, ...]) -> None:
    assert values_of(name, given) == values


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("batch", [], "expected one value or more"),
        ("batch", "1,,2", "expected a value between commas"),
        ("batch", "", "expected a value"),
        ("batch", "8..1", "expected a range LOW..HIGH"),
        ("batch", "1..8/1", "expected 2 to 10,000 points"),
        ("batch", "1..8/" + "9" * 5000, "expected 2 to 10,000 points"),
        ("pcie_gbps", "1..1e400", "expected a range LOW..HIGH"),
        ("batch", "9" * 100_000, "a number of 100,000 characters"),
        ("policy", "1..2", "expected a range LOW..HIGH of numbers"),
        ("parameters.pool", "0..1", "expected a range LOW..HIGH of numbers"),
        ("batch", "[1", "not plain YAML"),
        ("batches", "1", "did you mean 'batch'"),
    ],
    ids=lambda it: str(it)[:30],
)
def test_what_names_no_values(name: str, given: object, says: str) -> None:
    with pytest.raises(SweepError, match=says.replace("[", r"\[")):
        values_of(name, given)


def test_a_fine_range_has_as_many_points_as_asked() -> None:
    """Three digits would leave 901 of them."""
    values = values_in("pcie_gbps", "10..100/2000")
    assert len(values) == 2000
    assert list(values) == sorted(values)


def test_true_is_not_one() -> None:
    assert distinct([1, True, 1.0, True, "1"]) == (1, True, "1")


def test_lists_and_mappings_are_kept_once() -> None:
    once = ({"dali": {"window": 2}}, {"dali": {"window": True}}, [0, 1], [1, 0], None)
    assert distinct([*once, {"dali": {"window": 2.0}}, [0, 1.0], None]) == once


@given(st.lists(st.integers(0, 3) | st.booleans() | st.sampled_from([0.0, 1.5, "1", None])))
def test_each_is_kept_once_in_order(values: list[Any]) -> None:
    """The same as by comparing all with all."""
    kept: list[Any] = []
    for value in values:
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in kept):
            kept.append(value)
    assert list(map(repr, distinct(values))) == list(map(repr, kept))


@given(low=st.integers(1, 50), more=st.integers(1, 200), count=st.integers(2, 40))
def test_a_range_has_its_ends_rises_and_has_no_more_points_than_asked(low: int, more: int, count: int) -> None:
    for name, scale in (("pcie_gbps", 1), ("batch", 1), ("cached_share", 250)):
        values = values_in(name, f"{low / scale}..{(low + more) / scale}/{count}")
        assert (values[0], values[-1]) == (low / scale, (low + more) / scale)
        assert list(values) == sorted(set(values))
        assert 2 <= len(values) <= count
