"""Cache-prior routing: who is chosen with a bonus for residents, worked out by hand and against a reference."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import ExpertId
from policies.papers.buddymoe import BuddyRouter, buddies_of
from policies.papers.cache_prior import LEAST_SCORE, CachePriorRouter
from policies.papers.specmd import LeastStaleCache
from policies.protocols import Cache, PolicyKind
from policies.registry import system
from policies.testing.cache_laws import LAYERS, CacheLaws, CacheScenario
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from tests.kit.views import costs, scored_view, view

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
    for kept in (scored_view([ROW], 3, resident=(3,), phase="prefill"), scored_view([ROW], 3, resident=(0, 1))):
        assert CachePriorRouter(0.05, "probability").route(kept) is kept.routing


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


# --- BuddyMoE ---------------------------------------------------------------------------------------------------------


SIMILAR_ROW = (0.40, 0.30, 0.20, 0.05, 0.03, 0.02)  # the router takes 0, 1 and 2
BUDDIES = [[[1, 3], [3, 4], [1, 4, 3], [], [], []]]


def replaced(row: tuple[float, ...] = SIMILAR_ROW, *, entropy: float = 0.0, keep: int = 1, **there: Any) -> list[int]:
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
    assert replaced(resident=resident) == expected, why


def test_what_is_staged_or_on_its_way_counts_as_there() -> None:
    assert replaced(resident=(0, 1), staged=(4,)) == [0, 1, 4]
    assert replaced(resident=(0, 1, 4), loading={2: 7}) == [0, 1, 2]


def test_how_many_of_the_best_stay() -> None:
    assert replaced(resident=(1, 2, 3), keep=0) == [3, 1, 2]
    assert replaced(resident=(0, 4), keep=3) == [0, 1, 2]


def test_a_token_that_puts_its_weight_on_one_expert_stays() -> None:
    peaked = (0.90, 0.05, 0.04, 0.005, 0.003, 0.002)  # entropy over three: 0.22 of log 3 after scaling; ROW has 0.96
    assert replaced(peaked, entropy=0.5, resident=(0, 1, 4)) == [0, 1, 2]
    assert replaced(entropy=0.5, resident=(0, 1, 4)) == [0, 1, 4]


def test_the_buddy_has_the_weight_of_the_expert_that_it_replaces() -> None:
    view = scored_view([SIMILAR_ROW], 3, resident=(0, 1, 4))
    routing = BuddyRouter(BUDDIES, 0.0, 1).route(view)
    assert routing.token_weights == view.routing.token_weights
    assert routing.active == (0, 1, 4)


def test_a_prompt_keeps_the_routing_itself() -> None:
    view = scored_view([SIMILAR_ROW], 3, resident=(0, 1, 4), phase="prefill")
    assert BuddyRouter(BUDDIES, 0.0, 1).route(view) is view.routing


# --- Pre-gated MoE ----------------------------------------------------------------------------------------------------


SCENARIO = Scenario(prompt_tokens=8, generated_tokens=4)


def test_copies_ahead_are_all_of_use_and_save_time() -> None:
    ahead = play(prepare(SCENARIO.with_(policy="pre-gated"))).metrics
    without = play(prepare(SCENARIO.with_(policy="on-demand", parameters={"cache": "none"}))).metrics
    assert (ahead.prefetch_accuracy, ahead.prefetches_wasted) == (1.0, 0)
    assert ahead.prefetches_used + ahead.prefetches_late > 0
    assert ahead.tpot_ms < without.tpot_ms


def test_it_is_marked_as_clairvoyant() -> None:
    assert system("pre-gated").needs.kind == PolicyKind.CLAIRVOYANT


# --- Least-Stale ------------------------------------------------------------------------------------------------------


UNIT = costs([1], [1])


class TestLeastStaleLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return LeastStaleCache(LAYERS)


def used(cache: LeastStaleCache, step: int, *by_layer: int) -> None:
    """A step of layers that each use one expert, admitted where it is not there."""
    for layer, expert in enumerate(by_layer):
        cache.observe(view({expert: 1}, UNIT, layer=layer, step=step))
        key = ExpertId(layer, expert)
        if key not in cache._home:
            cache.admitted(key, 0)


def leaving(cache: LeastStaleCache, count: int) -> list[ExpertId]:
    gone = []
    for _ in range(count):
        victim = cache.victim(ExpertId(0, 9), 0, ())
        assert victim is not None
        cache.evicted(victim, 0)
        gone.append(victim)
    return gone


def test_what_the_last_turn_left_unused_goes_first_then_the_layer_that_was_at_work_last() -> None:
    cache = LeastStaleCache(3)
    used(cache, 0, 0, 0, 0)
    used(cache, 1, 1, 0, 1)
    assert leaving(cache, 5) == [ExpertId(2, 0), ExpertId(0, 0), ExpertId(2, 1), ExpertId(1, 0), ExpertId(0, 1)]


def test_within_a_step_the_layers_to_come_are_kept() -> None:
    cache = LeastStaleCache(3)
    used(cache, 0, 0, 0, 0)
    used(cache, 1, 1)  # layer 1 is next
    assert leaving(cache, 4) == [ExpertId(0, 0), ExpertId(0, 1), ExpertId(2, 0), ExpertId(1, 0)]
