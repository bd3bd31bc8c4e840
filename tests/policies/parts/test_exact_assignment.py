"""The exact solver against enumeration and against HiGHS."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.mechanism.views import LayerView
from policies.papers.dali.parts import GreedyAssigner
from policies.parts.exact_assignment import ExactAssigner, solve, solve_with_highs
from policies.parts.objective import makespan
from tests.kit.depth import examples
from tests.kit.views import costs, view, views

Items = list[tuple[int, int]]


def items(most: int, longest_ns: int) -> st.SearchStrategy[Items]:
    """(t_gpu, t_cpu) of up to ``most`` experts, drawn from few or many kinds."""
    pair = st.tuples(st.integers(0, longest_ns), st.integers(0, longest_ns))
    few = st.lists(pair, min_size=1, max_size=4).flatmap(lambda kinds: st.lists(st.sampled_from(kinds), max_size=most))
    return st.one_of(few, st.lists(pair, max_size=most))


def firsts(longest_ns: int) -> st.SearchStrategy[tuple[int, int]]:
    """What the first expert takes in addition, on the CPU and on the GPU."""
    extra_ns = st.one_of(st.just(0), st.integers(0, longest_ns))
    return st.tuples(extra_ns, extra_ns)


def value(drawn: Items, first_ns: tuple[int, int], on_gpu: list[bool]) -> int:
    return makespan([g for g, _ in drawn], [c for _, c in drawn], on_gpu, *first_ns)


def solved(drawn: Items, first_ns: tuple[int, int]) -> int:
    return value(drawn, first_ns, solve([g for g, _ in drawn], [c for _, c in drawn], *first_ns))


@settings(max_examples=examples(100))
@given(items(10, 10**9), firsts(10**9))
def test_is_the_minimum_over_all_assignments(drawn: Items, first_ns: tuple[int, int]) -> None:
    every = ([bool(bits >> i & 1) for i in range(len(drawn))] for bits in range(1 << len(drawn)))
    assert solved(drawn, first_ns) == min(value(drawn, first_ns, on_gpu) for on_gpu in every)


@settings(max_examples=10)
@given(items(12, 30), firsts(30))
def test_is_the_minimum_of_twelve_experts_of_small_costs(drawn: Items, first_ns: tuple[int, int]) -> None:
    every = ([bool(bits >> i & 1) for i in range(len(drawn))] for bits in range(1 << len(drawn)))
    assert solved(drawn, first_ns) == min(value(drawn, first_ns, on_gpu) for on_gpu in every)


@settings(max_examples=60)
@given(items(40, 2000), firsts(2000))
def test_agrees_with_highs(drawn: Items, first_ns: tuple[int, int]) -> None:
    highs = solve_with_highs([g for g, _ in drawn], [c for _, c in drawn], *first_ns)
    assert solved(drawn, first_ns) == value(drawn, first_ns, highs)


@settings(max_examples=20)
@given(views())
def test_both_solvers_give_assignments_of_one_makespan(layer: LayerView) -> None:
    assert ExactAssigner("own").assign(layer).makespan_ns == ExactAssigner("highs").assign(layer).makespan_ns


def test_highs_that_gives_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scipy.optimize, "milp", lambda *_, **__: SimpleNamespace(x=None, message="out of time"))
    with pytest.raises(RuntimeError, match="HiGHS found no assignment of 2 experts: out of time"):
        solve_with_highs([1, 2], [3, 4], 0)


def test_nobody_to_assign() -> None:
    assert solve([], [], 7) == []


def test_avoids_the_cpu_when_its_first_expert_costs_more_than_it_saves() -> None:
    assert solve([5, 5], [4, 4], 0).count(True) == 1
    assert solve([5, 5], [4, 4], 7) == [True, True]


def test_avoids_the_gpu_when_its_first_expert_costs_more_than_it_saves() -> None:
    assert solve([1, 1], [4, 4], 0) == [True, True]
    assert solve([1, 1], [4, 4], 0, 9) == [False, False]
    assert solve([1, 1], [4, 4], 8, 9) == [True, True]  # one on each: 10 and 12


def test_beats_greedy_where_algorithm_1_is_short_sighted() -> None:
    cost = costs(gpu_ns=(10, 10, 10, 10), cpu_ns=(30, 60, 90, 120), copy_ns=100)
    layer = view({0: 1, 1: 1, 2: 2, 3: 4}, cost)  # greedy loads 2, since by difference it comes before 3
    assert GreedyAssigner().assign(layer).makespan_ns == 180
    assert ExactAssigner().assign(layer).makespan_ns == 120
