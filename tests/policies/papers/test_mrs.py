"""MRS, HybriMoE's score-aware cache: Eq. 3 by hand, and the laws of every cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.score_rows import top
from policies.mechanism.views import ExpertId, LayerView, Phase, PolicyError, Swap
from policies.papers.hybrimoe.mrs import MrsCache
from policies.protocols import Cache
from policies.testing.cache_laws import EXPERTS, LAYERS, CacheLaws, CacheScenario
from tests.kit.views import costs, view

COST = costs((1,), (1,))


class ScoredMrs(MrsCache):
    """MRS for views without scores: an expert's workload stands for its score."""

    def observe(self, view: LayerView) -> None:
        workload = view.routing.workload()
        super().observe(view._replace(scores=[[workload.get(expert, 0) / 10 for expert in range(EXPERTS)]]))


class TestMrsLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return ScoredMrs(LAYERS, EXPERTS, keep=2, alpha=0.5)


class TestMrsWithBackgroundLaws(CacheLaws):
    declines = True

    def fresh(self, scenario: CacheScenario) -> Cache:
        return ScoredMrs(LAYERS, EXPERTS, keep=2, alpha=0.5, background="decode", by_score=True)


def routed(cache: MrsCache, *tokens: Sequence[float], layer: int = 0) -> list[float]:
    """S of a layer after one more routing with these scores."""
    cache.observe(view({0: 1}, COST, layer=layer)._replace(scores=tokens))
    return list(cache.scores(layer))


def seated(cache: MrsCache, *experts: int) -> MrsCache:
    for expert in experts:
        cache.admitted(ExpertId(0, expert), 0)
    return cache


def victim(cache: MrsCache, *blocked: int) -> int | None:
    chosen = cache.victim(ExpertId(0, 9), 0, {ExpertId(0, expert) for expert in blocked})
    return None if chosen is None else chosen.expert


def test_equation_3_by_hand() -> None:
    cache = MrsCache(1, 4, keep=2, alpha=0.5)
    assert routed(cache, (0.5, 0.25, 0.125, 0.125)) == [0.25, 0.125, 0, 0]  # half of the two largest
    # the two largest are 3 and 1; 0 is outside and decays by half, 2 has nothing to lose
    assert routed(cache, (0.125, 0.25, 0.125, 0.5)) == [0.125, 0.1875, 0, 0.25]
    assert routed(cache, (0.125, 0.125, 0.5, 0.25)) == [0.0625, 0.09375, 0.25, 0.25]


def test_alpha_weighs_the_present() -> None:
    slow, fast = (MrsCache(1, 2, keep=2, alpha=alpha) for alpha in (0.25, 1.0))
    for cache in (slow, fast):
        routed(cache, (1.0, 0.0))
    assert routed(slow, (0.0, 1.0)) == [0.1875, 0.25]  # 0.75 * 0.25
    assert routed(fast, (0.0, 1.0)) == [0.0, 1.0]


def test_evicts_the_smallest_score_that_may_leave() -> None:
    cache = seated(MrsCache(1, 4, keep=4, alpha=0.5), 0, 1, 2)
    routed(cache, (0.25, 0.125, 0.5, 0.125))  # 3 is no member
    assert [victim(cache), victim(cache, 1), victim(cache, 0, 1), victim(cache, 0, 1, 2)] == [1, 0, 2, None]


def test_an_expert_that_was_scored_often_outlives_one_that_was_scored_last() -> None:
    cache = seated(MrsCache(1, 3, keep=1, alpha=0.25), 0, 1)
    for scores in [(0.9, 0.1, 0.0)] * 4 + [(0.4, 0.6, 0.0)]:
        routed(cache, scores)
    assert victim(cache) == 1  # LRU would evict 0


def test_scores_go_on_while_an_expert_is_out() -> None:
    cache = seated(MrsCache(1, 3, keep=1, alpha=0.5), 0, 1)
    cache.evicted(ExpertId(0, 0), 0)
    routed(cache, (1.0, 0.0, 0.0))
    seated(cache, 0)
    assert victim(cache) == 1


def test_ties_go_to_the_lower_id() -> None:
    assert victim(seated(MrsCache(1, 4, keep=2, alpha=0.5), 2, 0, 1)) == 0
    assert top(np.array([[0.25, 0.25, 0.25, 0.25]]), 2).tolist() == [[0.25, 0.25, 0, 0]]


def test_top_tells_numbers_apart_that_single_precision_does_not() -> None:
    rows = np.array([[0.5, 0.5 + 2**-40, 0.1, 0.5 + 2**-30]])
    assert top(rows, 2).tolist() == [[0, 0.5 + 2**-40, 0, 0.5 + 2**-30]]


@pytest.mark.parametrize(("tokens", "expected"), [("mean", [0.25, 0.25, 0]), ("first", [0.5, 0, 0])])
def test_many_tokens_are_the_mean_of_their_tops(tokens: Literal["mean", "first"], expected: list[float]) -> None:
    # TopP token by token: (1, 0, 0) and (0, 1, 0), although expert 2 has the second largest mean
    cache = MrsCache(1, 3, keep=1, alpha=0.5, tokens=tokens)
    assert routed(cache, (1.0, 0.0, 0.9), (0.0, 1.0, 0.9)) == expected


def test_keeps_all_where_there_are_no_more_than_p() -> None:
    assert routed(MrsCache(1, 2, keep=12, alpha=0.5), (0.75, 0.25)) == [0.375, 0.125]


def test_layers_have_scores_of_their_own_and_may_share_a_pool() -> None:
    cache = MrsCache(2, 2, keep=1, alpha=0.5)
    routed(cache, (0.0, 1.0))
    routed(cache, (0.5, 0.0), layer=1)
    pool = [ExpertId(0, 1), ExpertId(1, 0), ExpertId(1, 1)]
    for id in pool:
        cache.admitted(id, 0)
    leaving = [cache.victim(ExpertId(0, 0), 0, blocked) for blocked in ((), pool[2:], pool[1:])]
    assert leaving == [ExpertId(1, 1), ExpertId(1, 0), ExpertId(0, 1)]


@pytest.mark.parametrize(("phase", "other"), [("decode", "prefill"), ("prefill", "decode")])
def test_in_the_background_the_best_absent_expert_replaces_the_worst_resident(phase: Phase, other: Phase) -> None:
    cache = seated(MrsCache(1, 4, keep=4, alpha=0.5, background=phase), 0, 1)
    here = view({0: 1}, COST, phase=phase, resident=[(0, 1)])
    assert list(cache.swaps(here, "layer_end")) == []  # all S are 0: none is better
    routed(cache, (0.1, 0.2, 0.4, 0.3))
    assert list(cache.swaps(here, "routed")) == []
    assert list(cache.swaps(here, "layer_end")) == [Swap(ExpertId(0, 2), ExpertId(0, 0))]
    seated(cache, 2)  # on its way
    assert list(cache.swaps(here, "layer_end")) == [Swap(ExpertId(0, 3), ExpertId(0, 0))]
    assert list(cache.swaps(here._replace(phase=other), "layer_end")) == []
    assert list(MrsCache(1, 4, keep=4, alpha=0.5).swaps(here, "layer_end")) == []


def test_in_a_prompt_the_layers_reached_are_evicted_first() -> None:
    """Layer 1 has no S yet, so that its members would leave first."""
    cache = MrsCache(2, 2, keep=2, alpha=0.5, reached_first=True)
    for key in (first := ExpertId(0, 1), second := ExpertId(1, 0)):
        cache.admitted(key, 0)
    cache.observe(view({0: 1}, COST, phase="prefill")._replace(scores=[(0.5, 0.25)]))
    assert [cache.victim(ExpertId(0, 0), 0, blocked) for blocked in ((), {first}, {first, second})] == [
        first, second, None,
    ]
    cache.observe(view({0: 1}, COST, phase="decode")._replace(scores=[(0.5, 0.25)]))
    assert cache.victim(ExpertId(0, 0), 0, ()) == second


def test_the_advantage_of_an_expert_is_over_the_member_that_would_leave() -> None:
    cache = MrsCache(1, 4, keep=4, alpha=0.5)
    assert cache.advantages(0, [3], 0) == [None]  # no S yet
    routed(cache, (0.25, 0.5, 0.125, 0.0))
    assert cache.advantages(0, [0, 3], 0) == [1, None]  # a free slot
    seated(cache, 0, 1)  # of S 0.125 and 0.25
    assert cache.advantages(0, [1, 0, 2], 0) == [0.5, 0, 0]


def test_by_score_a_load_of_less_s_than_its_victim_is_not_kept() -> None:
    for by_score, expected in ((True, None), (False, ExpertId(0, 0))):
        cache = seated(MrsCache(1, 4, keep=4, alpha=0.5, by_score=by_score), 0, 1)
        routed(cache, (0.3, 0.4, 0.2, 0.3))
        assert cache.victim(ExpertId(0, 2), 0, ()) == expected
        assert cache.victim(ExpertId(0, 3), 0, ()) == ExpertId(0, 0)  # as good as it is good enough


def test_without_scores_it_says_what_is_missing() -> None:
    with pytest.raises(PolicyError, match=r"step 3, layer 0: expected router scores of all experts, the view has none"):
        MrsCache(1, 2, keep=1, alpha=0.5).observe(view({0: 1}, COST, step=3))


# --- what is quick is right: the definitions, told plainly ------------------------------------------------------------

_IDS = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)).map(lambda pair: ExpertId(*pair))
_ROUTED = st.tuples(st.integers(0, LAYERS - 1), st.lists(st.integers(0, 3), min_size=EXPERTS, max_size=EXPERTS))
_TOLD = st.one_of(_IDS, st.frozensets(_IDS), _ROUTED.map(list))  # comes or goes; blocked meanwhile; a layer is routed


@given(st.booleans(), st.lists(_TOLD, max_size=60))
def test_the_victim_is_the_least_of_all_members_that_are_not_blocked(pooled: bool, told: list[object]) -> None:
    cache, members = MrsCache(LAYERS, EXPERTS, keep=2, alpha=0.5), set[ExpertId]()
    for what in told:
        if isinstance(what, ExpertId):
            group = 0 if pooled else what.layer
            (cache.evicted if what in members else cache.admitted)(what, group)
            members ^= {what}
        elif isinstance(what, frozenset):
            for group in range(1 if pooled else LAYERS):
                free = [id for id in members - what if pooled or id.layer == group]
                least = min(free, key=lambda id: (cache.scores(id.layer)[id.expert], id), default=None)
                assert cache.victim(ExpertId(group, 0), group, what) == least
        elif isinstance(what, list):
            layer, scores = what
            routed(cache, [score / 4 for score in scores], layer=layer)


@given(st.lists(st.lists(st.integers(0, 4), min_size=7, max_size=7), min_size=1, max_size=5), st.integers(1, 8))
def test_top_keeps_the_first_of_a_stable_sort(rows: list[list[int]], keep: int) -> None:
    kept = [set(sorted(range(7), key=lambda column, row=row: -row[column])[:keep]) for row in rows]
    pairs = zip(rows, kept, strict=True)
    expected = [[value if place in best else 0 for place, value in enumerate(row)] for row, best in pairs]
    assert top(np.array(rows, np.float64), keep).tolist() == expected
