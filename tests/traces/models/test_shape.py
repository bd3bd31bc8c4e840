"""The shape of a model, the parts of its name, and the work of its experts in a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.models.catalogue import load_model, model_names
from traces.models.names import ModelName, parted
from traces.models.shape import ExpertWork, ModelShape, ShapeError
from trilane.testing.worlds import toy_shape


@pytest.mark.parametrize(("name", "base"), [
    ("phi-3.5-moe", "phi-3.5-moe"),
    ("phi-3.5-moe:8", "phi-3.5-moe"),
    ("qwen3-30b-a3b@q4_k_m:8", "qwen3-30b-a3b@q4_k_m"),  # other bytes, and so another model to a profile
])
def test_a_model_that_is_cut_keeps_the_name_of_the_whole(name: str, base: str) -> None:
    assert replace(toy_shape(2, 4, 2), name=name).base_name == base


def test_a_quantised_file_gives_the_size_of_an_expert_in_every_layer() -> None:
    shape = toy_shape(2, 4, 2)
    assert replace(shape, expert_bytes=(70, 50)).routed_bytes == 4 * (70 + 50)
    for sizes in ((70,), (70, 50, 30)):
        with pytest.raises(ShapeError, match=f"an entry for each of the 2 MoE layers, got {len(sizes)}"):
            replace(shape, expert_bytes=sizes)


def test_the_most_experts_that_later_products_hold() -> None:
    shape = replace(toy_shape(1, 4, 2), moe_layers=64)
    assert replace(shape, experts=2**13).moe_layers == 64
    with pytest.raises(ShapeError, match=r"at most 524,288 experts in all layers together.* got 524,352"):
        replace(shape, experts=2**13 + 1)


GOOD = toy_shape(2, 4, 2).to_dict()
COUNTS = [name for name, value in GOOD.items() if type(value) is int]


@pytest.mark.parametrize("value", [-3, True, "2", 2.5, None, 10**15, float("nan"), [2]])
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_whole_number_in_a_range(name: str, value: object) -> None:
    """Once, a trace that said ``dense_layers: -3`` made every policy faster."""
    with pytest.raises(ShapeError, match=rf"model shape: {name}: expected a whole number from [01] to "):
        ModelShape.from_dict({**GOOD, name: value})


@pytest.mark.parametrize("wrong", [
    {"weight_bits": 0}, {"dense_bits": -16}, {"kv_bits": 1e308}, {"weight_bits": True}, {"expert_bytes": [0, 192]},
    {"expert_bytes": [192, -1]}, {"expert_bytes": [192]}, {"norm_topk": 1}, {"tied_embeddings": "no"},
    {"sources": {"vocab": 3}}, {"name": 3}, {"name": "toy\x1b[31m"}, {"name": "\u202eyot"}, {"name": "\ud800"},
    {"name": "two\nlines"}, {"name": "x" * 301}, {"top_k": 5}, {"moe_layers": 1000, "experts": 32768},
    {"hidden": 10**6, "expert_width": 10**6, "experts": 10000}, {"weight_bits": 0.01},
    {"attention_params": 10**12, "dense_layers": 1000}, {"attention": [{"reach": "full", "params": -1}]},
])
def test_a_shape_that_no_model_has_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ShapeError):
        ModelShape.from_dict({**GOOD, **wrong})


def test_the_limits_are_far_from_every_known_model() -> None:
    for name in model_names():
        shape = load_model(name)
        larger = {name: 3 * getattr(shape, name) for name in ("moe_layers", "experts", "hidden", "expert_width")}
        replace(shape, **larger, expert_bytes=(), attention=None, attention_layers=None, moe_blocks=None)


def test_blocks_of_experts_follow_the_dense_layers_or_are_listed() -> None:
    shape = toy_shape(3, 4, 2)
    assert replace(shape, dense_layers=2).expert_blocks == (2, 3, 4)
    assert replace(shape, moe_blocks=(1, 3, 5, 7)).expert_blocks == (1, 3, 5)
    with pytest.raises(ShapeError, match="moe_blocks needs an entry for each of the 3 MoE layers, got 2"):
        replace(shape, moe_blocks=(1, 3))


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(4, 2, 1), (4, 2, 2), (4, 2, 3), (4, 4, 2), (5, 1, 4)])
def test_active_experts_are_the_mean_over_all_that_the_tokens_may_choose(experts: int, top_k: int, tokens: int) -> None:
    """Counted one by one. Their rows add up to the tokens' choices."""
    choices = list(product(combinations(range(experts), top_k), repeat=tokens))
    active = sum(len({expert for chosen in each for expert in chosen}) for each in choices) / len(choices)
    work = ExpertWork.of(toy_shape(1, experts, top_k), tokens)
    assert work.active == pytest.approx(active)
    assert work.active * work.rows == pytest.approx(tokens * top_k)


@pytest.mark.parametrize(("rows", "most", "ns"), [(1.0, 1, 2 * 10), (2.0, 2, 2 * 30), (1.25, 2, 2 * 15)])
def test_time_between_whole_numbers_of_rows_is_interpolated(rows: float, most: int, ns: float) -> None:
    work = ExpertWork(active=2, rows=rows)
    assert work.most_rows == most
    assert work.ns([0, 10, 30]) == pytest.approx(ns)


def test_an_active_expert_has_a_row_whatever_rounding_makes_of_it() -> None:
    """64 experts x (1 - (1 - 6 / 64)) is a little more than 6 in floating point."""
    rows = [ExpertWork.of(toy_shape(1, experts, top_k), 1).rows for experts in range(8, 129) for top_k in (1, 6, 8)]
    assert min(rows) == 1.0
    assert max(rows) < 1 + 1e-9


@pytest.mark.parametrize(("name", "parts"), [
    ("phi-3.5-moe", ("phi-3.5-moe", None, None)),
    ("phi-3.5-moe@q4_k_m", ("phi-3.5-moe", "q4_k_m", None)),
    ("phi-3.5-moe@q4_k_m:8", ("phi-3.5-moe", "q4_k_m", "8")),
    ("phi-3.5-moe:8@q4_k_m", ("phi-3.5-moe", None, "8@q4_k_m")),
    ("a@b/c:d/config.json@q8_0:2", ("a@b/c:d/config.json", "q8_0", "2")),
    ("mine@home.gguf", ("mine@home.gguf", None, None)),
    ("mine-00001-of-00002.gguf:4", ("mine-00001-of-00002.gguf", None, "4")),
    ("folder@1/model@q8_0", ("folder@1/model", "q8_0", None)),
])
def test_the_parts_of_a_name(name: str, parts: tuple[str | None, ...]) -> None:
    assert tuple(parted(name)) == parts


@given(st.text())
def test_the_parts_give_the_name_again(name: str) -> None:
    assert str(parted(name)) == name


@given(st.from_regex(r"[a-z0-9.-]{1,9}", fullmatch=True), st.sampled_from([None, "q4_0"]), st.sampled_from([None, "3"]))
def test_a_name_gives_its_parts_again(model: str, weights: str | None, layers: str | None) -> None:
    made = ModelName(model, weights, layers)
    assert parted(str(made)) == made
