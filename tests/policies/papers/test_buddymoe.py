"""BuddyMoE: the table of similar experts, and who takes the place of one that misses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.papers.buddymoe import BuddyRouter, buddies_of
from tests.kit.views import scored_view

ROW = (0.40, 0.30, 0.20, 0.05, 0.03, 0.02)  # the router takes 0, 1 and 2
BUDDIES = [[[1, 3], [3, 4], [1, 4, 3], [], [], []]]


def chosen(row: tuple[float, ...] = ROW, *, entropy: float = 0.0, keep: int = 1, **there: Any) -> list[int]:
    view = scored_view([row], 3, **there)
    return list(BuddyRouter(BUDDIES, entropy, keep).route(view).token_ids[0])


def test_buddies_are_those_that_most_tokens_use_together() -> None:
    ids = np.array([[[0, 1]], [[0, 1]], [[0, 2]], [[2, 3]]], np.int16)  # [tokens, 1 layer, 2]
    assert buddies_of(ids, 5, most=4) == [[[1, 2], [0], [0, 3], [2], []]]
    assert buddies_of(ids, 5, most=1) == [[[1], [0], [0], [2], []]]


@pytest.mark.parametrize(("resident", "expected", "why"), [
    ((0, 1, 2), [0, 1, 2], "none misses"),
    ((0, 1, 4), [0, 1, 4], "2's best buddy is 1, which the token has; the next is 4"),
    ((0, 3, 4), [0, 3, 4], "1 takes 3, and 2 what is left"),
    ((1, 2, 3), [0, 1, 2], "the best one stays, to be copied"),
    ((0, 1, 5), [0, 1, 2], "5 is no buddy of 2"),
])
def test_a_buddy_that_is_there_takes_the_place(resident: tuple[int, ...], expected: list[int], why: str) -> None:
    assert chosen(resident=resident) == expected, why


def test_what_is_staged_or_on_its_way_counts_as_there() -> None:
    assert chosen(resident=(0, 1), staged=(4,)) == [0, 1, 4]
    assert chosen(resident=(0, 1, 4), loading={2: 7}) == [0, 1, 2]


def test_how_many_of_the_best_stay() -> None:
    assert chosen(resident=(1, 2, 3), keep=0) == [3, 1, 2]
    assert chosen(resident=(0, 4), keep=3) == [0, 1, 2]


def test_a_token_that_puts_its_weight_on_one_expert_stays() -> None:
    peaked = (0.90, 0.05, 0.04, 0.005, 0.003, 0.002)  # entropy over three: 0.22 of log 3 after scaling; ROW has 0.96
    assert chosen(peaked, entropy=0.5, resident=(0, 1, 4)) == [0, 1, 2]
    assert chosen(entropy=0.5, resident=(0, 1, 4)) == [0, 1, 4]


def test_the_buddy_has_the_weight_of_the_expert_that_it_replaces() -> None:
    view = scored_view([ROW], 3, resident=(0, 1, 4))
    routing = BuddyRouter(BUDDIES, 0.0, 1).route(view)
    assert routing.token_weights == view.routing.token_weights
    assert routing.active == (0, 1, 4)


def test_a_prompt_keeps_the_routing_itself() -> None:
    view = scored_view([ROW], 3, resident=(0, 1, 4), phase="prefill")
    assert BuddyRouter(BUDDIES, 0.0, 1).route(view) is view.routing
