"""Assigners that look at each expert by itself, and the objective that all assigners share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertId, LayerView
from policies.papers.dali.parts import BeamAssigner, GreedyAssigner
from policies.parts.admission import Admission, Hotter, SecondMiss
from policies.parts.assigners import CostRule, LoadAll, ResidentOrCpu, ThresholdAssigner, break_even
from policies.parts.exact_assignment import ExactAssigner, solve, solve_with_highs
from policies.parts.objective import durations, makespan
from policies.protocols import Assigner
from tests.kit.depth import examples
from tests.kit.views import costs, view, views

ALL: list[Assigner] = [
    LoadAll(), ResidentOrCpu(), ResidentOrCpu(awaits=False), CostRule(), ThresholdAssigner(1), GreedyAssigner(),
    BeamAssigner(), ExactAssigner(),
]
COST = costs(gpu_ns=(10, 10, 10), cpu_ns=(40, 80, 120), first_cpu_ns=5, copy_ns=70)
LONG = costs(gpu_ns=(10,) * 9, cpu_ns=tuple(range(30, 300, 30)), copy_ns=100)  # copy + GPU 110: CPU up to 3 tokens
WORKLOAD = {0: 1, 1: 8, 2: 3, 3: 4, 4: 5}
READY = {0: 0, 1: 0, 4: 70}  # 4 is being copied


def four() -> LayerView:
    """Expert 2 is resident, 5 has 30 ns of copying left, 3 and 9 are absent."""
    return view({2: 1, 3: 2, 5: 1, 9: 3}, COST, ready={2: 0, 5: 30})


def test_durations_are_the_longer_of_transfer_and_compute() -> None:
    assert durations(four()) == ([10, 70, 30, 70], [40, 80, 40, 120])


def test_makespan_charges_the_first_cpu_expert_once() -> None:
    assert makespan((10, 70), (40, 80), (False, False), 5) == 125
    assert makespan((10, 70), (40, 80), (True, False), 5) == 85
    assert makespan((10, 70), (40, 80), (True, True), 5) == 80
    assert makespan((10, 70), (40, 80), (True, True), 5, 3) == 83  # kernels that the GPU's experts share
    assert makespan((10, 70), (40, 80), (False, False), 5, 300) == 125


def test_load_all_loads_the_largest_workload_first_after_what_is_there_or_coming() -> None:
    assert LoadAll().assign(four()) == Assignment((2, 5, 9, 3), (), (9, 3), 180)


def test_load_all_breaks_ties_by_the_lower_id() -> None:
    assert LoadAll().assign(view({7: 1, 1: 1, 4: 1}, COST)).loads == (1, 4, 7)


def test_resident_or_cpu_never_loads() -> None:
    assert ResidentOrCpu().assign(four()) == Assignment((2, 5), (9, 3), (), 205)
    assert ResidentOrCpu(awaits=False).assign(four()) == Assignment((2,), (9, 3, 5), (), 245)


@pytest.mark.parametrize(("workload", "device"), [(1, "cpu"), (2, "cpu"), (3, "gpu")])
def test_cost_rule_loads_only_if_copy_and_gpu_beat_the_cpu(workload: int, device: str) -> None:
    cost = costs(gpu_ns=(10, 10, 10), cpu_ns=(40, 80, 120), copy_ns=70)  # break-even: 80 ns, a tie for the CPU
    got = CostRule().assign(view({4: workload}, cost))
    assert (got.gpu, got.cpu, got.loads) == (((4,), (), (4,)) if device == "gpu" else ((), (4,), ()))


def test_above_the_threshold_to_the_gpu_and_what_is_there_stays() -> None:
    got = ThresholdAssigner(4).assign(view(WORKLOAD, LONG, ready=READY))
    assert (got.gpu, got.cpu, got.loads) == ((1, 0, 4), (3, 2), ())
    got = ThresholdAssigner(3).assign(view(WORKLOAD, LONG, ready=READY))
    assert (got.gpu, got.cpu, got.loads) == ((1, 0, 4, 3), (2,), (3,))


def test_residents_of_small_workload_leave_for_the_cpu_where_all_are_split() -> None:
    got = ThresholdAssigner(4, residents="split").assign(view(WORKLOAD, LONG, ready=READY))
    assert (got.gpu, got.cpu, got.loads) == ((1, 4), (3, 2, 0), ())


def test_the_threshold_is_static_whatever_else_the_layer_holds() -> None:
    layers = [{0: 4}, {0: 4, **dict.fromkeys(range(1, 30), 9)}]
    assert [0 in ThresholdAssigner(4).assign(view(workload, LONG)).cpu for workload in layers] == [True, True]


def test_without_a_number_it_is_the_break_even_of_each_layer() -> None:
    assert break_even(LONG) == 3
    assert break_even(costs((10, 10), (120, 240), copy_ns=100)) == 0
    assert break_even(costs((10, 10), (20, 40), copy_ns=100)) == 2  # never pays
    assert break_even(costs((10, 20), (110, 121), copy_ns=100)) == 1  # at 1 the same: the CPU
    assigner = ThresholdAssigner()
    for layer, cost, loads in ((0, LONG, (3,)), (1, LONG._replace(copy_ns=1000), ())):
        given = view({2: 3, 3: 4}, cost, layer=layer)
        assert assigner.assign(given).loads == loads


@given(views())
def test_every_assigner_covers_each_active_expert_once_and_loads_what_is_absent(layer: LayerView) -> None:
    for assigner in ALL:
        gpu, cpu, loads = assigner.assign(layer)[:3]
        assert sorted(gpu + cpu) == list(layer.routing.active)
        assert loads == tuple(e for e in gpu if layer.ready_ns[e] == INFINITE_NS)


@given(views())
def test_every_assigner_reports_the_shared_objective(layer: LayerView) -> None:
    gpu_ns, cpu_ns = durations(layer)
    for assigner in ALL:
        got = assigner.assign(layer)
        on_gpu = [e in got.gpu for e in layer.routing.active]
        assert got.makespan_ns == makespan(gpu_ns, cpu_ns, on_gpu, layer.costs[0].first_cpu_ns)


@given(views())
def test_law_8_exact_assignment_is_never_worse_than_any_other(layer: LayerView) -> None:
    best = ExactAssigner().assign(layer).makespan_ns
    assert all(best <= assigner.assign(layer).makespan_ns for assigner in ALL)


# --- Admission --------------------------------------------------------------------------------------------------------


A, B = ExpertId(0, 0), ExpertId(0, 1)
UNIT = costs([1], [1])


def route(admission: SecondMiss | Hotter, step: int, *active: int, missed: frozenset[int] | None = None) -> None:
    seen = view(dict.fromkeys(active, 1), UNIT, step=step)
    admission.observe(seen, frozenset(active) if missed is None else missed)


def test_every_miss() -> None:
    assert Admission().admits(A, None)
    assert Admission().admits(A, B)


def test_the_second_miss_within_the_window() -> None:
    admission = SecondMiss(window=3)
    route(admission, 0, 0, 1)
    assert not admission.admits(A, B)
    assert admission.admits(A, None), "a free slot takes any"
    route(admission, 2, 0)
    route(admission, 3, 1)
    assert admission.admits(A, B)
    assert not admission.admits(B, A), "steps 0 and 3 are three apart"


def test_a_hit_is_no_miss() -> None:
    admission = SecondMiss(window=3)
    route(admission, 0, 0)
    route(admission, 1, 0, missed=frozenset())
    assert not admission.admits(A, B)


def test_hotter_by_a_quarter_and_one() -> None:
    admission = Hotter()
    for step, active in enumerate([(0, 1), (0, 1), (0, 1), (0, 1), (0,)]):
        route(admission, step, *active)
    assert [admission.heat(key) for key in (A, B)] == [5, 4]
    assert not admission.admits(A, B)
    route(admission, 5, 0)
    assert not admission.admits(A, B), "6 is not above 1.25 x 4 + 1"
    route(admission, 6, 0)
    assert admission.admits(A, B)
    assert admission.admits(B, None), "a free slot takes any"


def test_heat_is_halved_every_half_life_whoever_is_routed_then() -> None:
    admission = Hotter(half_life=4)
    for step in range(4):
        route(admission, step, 0)
    route(admission, 4, 1)
    assert [admission.heat(key) for key in (A, B)] == [2, 1]
    route(admission, 12, 1)
    assert [admission.heat(key) for key in (A, B)] == [0.5, 1.25]


def test_without_a_half_life_heat_stays() -> None:
    admission = Hotter(half_life=None, margin=1.5, floor=0.0)
    route(admission, 0, 0, 1)
    route(admission, 1_000_000, 0)
    assert [admission.heat(key) for key in (A, B)] == [2, 1]
    assert admission.admits(A, B)


# --- the exact solver against enumeration and against HiGHS -----------------------------------------------------------


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
