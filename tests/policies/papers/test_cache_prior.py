"""Cache-prior routing: who is chosen with a bonus for residents, worked out by hand and against a reference."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.papers.cache_prior import LEAST_SCORE, CachePriorRouter
from tests.kit.views import scored_view

ROW = (0.40, 0.20, 0.16, 0.12, 0.08, 0.04)  # the router takes 0, 1 and 2


def chosen(router: CachePriorRouter, *resident: int, row: tuple[float, ...] = ROW) -> list[int]:
    return list(router.route(scored_view([row], 3, resident=resident)).token_ids[0])


@pytest.mark.parametrize(("bonus", "resident", "expected", "why"), [
    (0.05, (3,), [0, 1, 3], "0.12 + 0.05 is above 0.16"),
    (0.05, (4,), [0, 1, 2], "0.08 + 0.05 is not"),
    (0.05, (2, 3), [0, 1, 2], "both have the bonus"),
    (0.13, (3, 4), [0, 3, 4], "two give way"),
    (0.9, (3, 4, 5), [0, 3, 4], "the best one stays whatever the bonus"),
    (0.0, (3, 4, 5), [0, 1, 2], "no bonus"),
])
def test_a_bonus_in_probability(bonus: float, resident: tuple[int, ...], expected: list[int], why: str) -> None:
    assert chosen(CachePriorRouter(bonus, "probability"), *resident) == expected, why


def test_as_many_of_the_best_stay_as_are_kept() -> None:
    assert chosen(CachePriorRouter(0.9, "probability", keep=2), 3, 4) == [0, 1, 3]
    assert chosen(CachePriorRouter(0.9, "probability", keep=0), 3, 4, 5) == [3, 4, 5]


def test_a_bonus_as_a_share_of_the_range_of_logits() -> None:
    """The range is log 10; expert 3 needs log(0.16 / 0.12), an eighth of it."""
    assert chosen(CachePriorRouter(0.12), 3) == [0, 1, 2]
    assert chosen(CachePriorRouter(0.13), 3) == [0, 1, 3]


def test_the_range_is_the_mean_of_the_tokens_so_far() -> None:
    router = CachePriorRouter(0.13)
    flat = (0.21, 0.2, 0.19, 0.18, 0.17, 0.16)  # a range of 0.27
    chosen(router, row=flat)
    assert chosen(router, 3) == [0, 1, 2], "(2.3 + 0.27) / 2 x 0.13 is below log(0.16 / 0.12)"


def test_weights_are_the_scores_without_the_bonus() -> None:
    routing = CachePriorRouter(0.05, "probability").route(scored_view([ROW], 3, resident=(3,)))
    assert routing.token_weights[0] == pytest.approx([0.40 / 0.72, 0.20 / 0.72, 0.12 / 0.72])
    assert (routing.active, routing.tokens) == ((0, 1, 3), (1, 1, 1))


def test_a_prompt_and_an_unchanged_choice_keep_the_routing_itself() -> None:
    for view in (scored_view([ROW], 3, resident=(3,), phase="prefill"), scored_view([ROW], 3, resident=(0, 1))):
        assert CachePriorRouter(0.05, "probability").route(view) is view.routing


scores = st.lists(st.integers(0, 50), min_size=5, max_size=5).map(lambda row: tuple((s + 1e-9) / 100 for s in row))


@given(st.lists(scores, min_size=1, max_size=3), st.sets(st.integers(0, 4)), st.floats(0, 1), st.integers(0, 3))
def test_the_choice_is_the_best_by_modified_logit(
    rows: list[tuple[float, ...]], resident: set[int], bonus: float, keep: int
) -> None:
    view = scored_view(rows, 3, resident=resident)
    routing = CachePriorRouter(bonus, keep=keep).route(view)
    logits = [[log(max(score, LEAST_SCORE)) for score in row] for row in rows]
    extra = bonus * sum(max(row) - min(row) for row in logits) / len(rows)
    for own, row, new in zip(view.routing.token_ids, logits, routing.token_ids, strict=True):
        value = [z + extra * (e in resident) for e, z in enumerate(row)]
        rest = [e for e in range(5) if e not in own[:keep]]
        best = [*own[:keep], *sorted(rest, key=lambda e, value=value: -value[e])[: 3 - len(own[:keep])]]
        assert set(new) == set(best)
