"""SMoE's cache: the laws of all caches, the window by hand, and the shield, which is the session's pin."""

from __future__ import annotations

from collections.abc import Sequence

from policies.mechanism.views import ExpertId, LayerInput, LayerView, Routing
from policies.papers.smoe import ScoreWindowCache
from policies.protocols import Cache
from policies.testing.cache_laws import EXPERTS, LAYERS, CacheLaws, CacheScenario
from tests.kit.scripted_session import Placed, session, start
from tests.kit.views_with_scores import scored_view


class ScoredByWorkload(ScoreWindowCache):
    """Makes up the scores that the events of the laws do not have."""

    def observe(self, view: LayerView) -> None:
        workload = view.routing.workload()
        super().observe(view._replace(scores=[[workload.get(e, 0) / 8 for e in range(EXPERTS)]]))


class TestScoreWindowLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return ScoredByWorkload(LAYERS, EXPERTS, window=3)


def victim(steps: Sequence[Sequence[Sequence[float]]], *, members: Sequence[int], blocked: Sequence[int] = ()) -> int:
    """Who leaves after ``steps`` of [tokens][experts], with a window of two."""
    cache = ScoreWindowCache(1, 4, window=2)
    for expert in members:
        cache.admitted(ExpertId(0, expert), 0)
    for scores in steps:
        cache.observe(scored_view(scores, 2))
    chosen = cache.victim(ExpertId(0, 9), 0, {ExpertId(0, e) for e in blocked})
    assert chosen is not None
    return chosen.expert


ONE = [(0.5, 0.125, 0.25, 0.125)]
TWO = [(0.0, 0.625, 0.125, 0.25)]
THREE = [(0.0, 0.0, 0.75, 0.25)]


def test_the_lowest_mean_leaves_and_steps_before_the_window_do_not_count() -> None:
    everybody = range(4)
    assert victim([ONE], members=everybody) == 1, "1 and 3 have 1/8: the lower id"
    assert victim([ONE, TWO], members=everybody) == 2, "sums 1/2, 3/4, 3/8, 3/8"
    assert victim([ONE, TWO, THREE], members=everybody) == 0, "sums 0, 5/8, 7/8, 1/2: step one is out"


def test_a_window_longer_than_any_run_takes_no_memory() -> None:
    cache = ScoreWindowCache(1, 4, window=2**62)
    for expert in range(4):
        cache.admitted(ExpertId(0, expert), 0)
    cache.observe(scored_view(TWO, 2))
    assert cache.victim(ExpertId(0, 9), 0, ()) == ExpertId(0, 0)


def test_only_members_leave_and_not_the_blocked_ones() -> None:
    assert victim([ONE, TWO], members=(0, 1, 3)) == 3
    assert victim([ONE, TWO], members=(0, 1, 3), blocked=(3,)) == 0
    assert victim([ONE, TWO], members=(1, 3), blocked=(3,)) == 1


def test_an_unused_expert_with_a_high_score_stays() -> None:
    scores = [(0.3, 0.3, 0.25, 0.15)]  # 0 and 1 are used
    assert victim([scores], members=(2, 3)) == 3


def test_a_step_of_several_tokens_counts_their_mean() -> None:
    batch = [(0.5, 0.0, 0.25, 0.25), (0.0, 0.75, 0.0, 0.25)]  # means 1/4, 3/8, 1/8, 1/4
    assert victim([batch], members=range(4)) == 2
    assert victim([[(0.25, 0.25, 0.375, 0.125)], batch], members=range(4)) == 3, "sums 1/2, 5/8, 1/2, 3/8"


def test_nobody_has_a_score_at_first() -> None:
    assert victim([], members=(3, 2)) == 2


def test_the_shield_holds_until_the_layer_ends() -> None:
    """Two slots; 1 has the lower score, is used, and stays while 2 comes in; in the next step it goes."""
    it = session(Placed((0, 1), (0,), slots=(2, 1)), cache=ScoreWindowCache(2, 4))

    def route(step: int, layer: int, *active: int, scores: Sequence[float]) -> None:
        it.plan_layer(LayerInput(step, layer, "decode", Routing(active, (1,) * len(active)), [scores]))

    it.begin_step(0)
    route(0, 0, 1, 2, scores=(0.3, 0.1, 0.6, 0.0))
    copy = start(it)
    assert (copy.key, copy.victims) == (ExpertId(0, 2), (ExpertId(0, 0),)), "0 scores more than 1, and is not used"
    it.copied(copy)
    it.end_layer()
    route(0, 1, 0, scores=(1.0, 0.0, 0.0, 0.0))
    it.end_layer()
    it.end_step()
    it.begin_step(1)
    route(1, 0, 2, 3, scores=(0.3, 0.1, 0.6, 0.0))
    assert start(it).victims == (ExpertId(0, 1),)
