"""How many experts are active in a step, with how many rows each."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from traces.models.shape import ExpertWork
from trilane.testing.strategies import toy_shape


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
