"""SMoE's cache: the laws of all caches, the window by hand, and the shield, which is the session's pin.

Its split of missing experts: Algorithm 2 as printed, and with the objective of Eq. 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import Assignment, ExpertId, LayerInput, LayerView, Routing
from policies.papers.smoe import ScoreWindowCache, TwoPointer, best_scores, split
from policies.protocols import Cache
from policies.testing.cache_laws import EXPERTS, LAYERS, CacheLaws, CacheScenario
from tests.kit.views import Placed, costs, scored_view, session, start


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


LOAD, CPU = 30, 10  # the paper's S3: a CPU expert takes a third of a load (Section VI-C)


def slower(loads: int, missing: int, load: int = LOAD, cpu: int = CPU) -> int:
    """max(n_load C_load, n_cpu C_cpu), Eq. 4."""
    return max(loads * load, (missing - loads) * cpu)


@pytest.mark.parametrize(("missing", "as_printed", "sooner"), [
    (1, (1, 30), (0, 10)), (2, (1, 30), (0, 20)), (3, (1, 30), (1, 30)), (8, (2, 60), (2, 60)),
])
def test_the_s3_ratio(missing: int, as_printed: tuple[int, int], sooner: tuple[int, int]) -> None:
    """As printed the first is always loaded: one missing expert takes 1.0 instead of 0.33, two 1.0 instead of 0.67."""
    loads = [split(missing, LOAD, CPU, sooner=choice) for choice in (False, True)]
    assert [(n, slower(n, missing)) for n in loads] == [as_printed, sooner]


def algorithm_2(missing: Sequence[int], c_load: int, c_cpu: int) -> tuple[list[int], list[int]]:
    """The listing, with its two pointers."""
    loaded, computed = [], []
    t_load = t_cpu = left = 0
    right = len(missing) - 1
    while left <= right:
        if t_load <= t_cpu:
            t_load += c_load
            loaded.append(missing[left])
            left += 1
        else:
            t_cpu += c_cpu
            computed.append(missing[right])
            right -= 1
    return loaded, computed


costs_drawn = st.integers(1, 100)


@given(st.integers(0, 20), costs_drawn, costs_drawn)
def test_the_split_is_the_listings(missing: int, load: int, cpu: int) -> None:
    loads = split(missing, load, cpu, sooner=False)
    assert loads == len(algorithm_2(range(missing), load, cpu)[0])
    assert loads >= min(missing, 1), "the first is always loaded"


@given(st.integers(0, 20), costs_drawn, costs_drawn)
def test_with_eq_4_the_split_is_the_best_there_is(missing: int, load: int, cpu: int) -> None:
    loads = split(missing, load, cpu, sooner=True)
    assert slower(loads, missing, load, cpu) == min(slower(n, missing, load, cpu) for n in range(missing + 1))
    assert slower(loads, missing, load, cpu) <= slower(split(missing, load, cpu, sooner=False), missing, load, cpu)


# --- the assigner -----------------------------------------------------------------------------------------------------

SCORES = (0.25, 0.05, 0.2, 0.15, 0.1, 0.25)
COST = costs((5, 6), (10, 14), first_cpu_ns=4, copy_ns=LOAD)


def view_of(*scores: Sequence[float], k: int = 6, **there: Any) -> LayerView:
    return scored_view(scores, k, cost=there.pop("cost", COST), **there)


def assign(view: LayerView, **choices: Any) -> Assignment:
    return TwoPointer(**choices).assign(view)


def test_what_is_there_or_coming_runs_on_the_gpu_and_the_rest_is_split_by_score() -> None:
    view = view_of(SCORES, resident=(1,), loading={4: 7})
    # Missing by score: 0 and 5 (the lower id first), 2, 3. C_cpu = 10: load 0 (30), CPU 3, 2, 5 (10, 20, 30).
    assert assign(view) == Assignment((1, 4, 0), (3, 2, 5), (0,), makespan_ns=5 + 7 + 30)
    few = view_of(SCORES, resident=(1, 3, 5), loading={4: 7})  # 0 and 2 miss
    assert assign(few) == Assignment((1, 3, 5, 4, 0), (2,), (0,), makespan_ns=15 + 7 + 30)
    # Done sooner on the CPU: 10 < 30, then 20 < 30. The first CPU expert takes 4 more than planned with.
    assert assign(few, sooner=True) == Assignment((1, 3, 5, 4), (2, 0), (), makespan_ns=4 + 20)


def test_an_expert_of_several_tokens_counts_once_with_its_best_score() -> None:
    view = view_of((0.5, 0.4, 0.1), (0.1, 0.3, 0.6), k=2)  # tokens of 0, 1 and 2, 1
    assert best_scores(view) == {0: 0.5, 1: 0.4, 2: 0.6}
    assert assign(view).loads == (2,)
    assert assign(view).cpu == (1, 0)


def test_c_cpu_is_the_mean_of_the_last_ones() -> None:
    """A history of two. Layers with two tokens on each expert (14 on the CPU), then with one (10)."""
    two_tokens = view_of(SCORES[:3], SCORES[:3], k=3, cost=costs((5, 6), (10, 28), first_cpu_ns=4, copy_ns=LOAD))
    one_token = view_of(SCORES[:4], k=4, cost=costs((5, 6), (10, 28), first_cpu_ns=4, copy_ns=LOAD))
    it = TwoPointer(history=2)
    # First: C_cpu = mean(28, 28, 28): load 0 (30 > 0), CPU 1 (28 < 30), CPU 2 (56). History: 28 + 4, 28.
    assert it.assign(two_tokens).cpu == (1, 2)
    # Four missing, C_cpu = 30: load 0 (30), CPU 1 (30), load 2 (a tie loads), CPU 3. History: 10 + 4, 10.
    assert (it.assign(one_token).loads, it.assign(one_token).cpu) == ((0, 2), (1, 3, 2))
    # The second look already has C_cpu = 12: load 0 (30), CPU 12, 24, 36.


def test_nothing_missing_nothing_to_split() -> None:
    assert assign(view_of(SCORES, resident=range(6))) == Assignment((0, 1, 2, 3, 4, 5), (), (), makespan_ns=30)
