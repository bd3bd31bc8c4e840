"""Assigners that look at each expert by itself, and the objective that all assigners share."""

from __future__ import annotations

import pytest
from hypothesis import given

from policies.mechanism.views import INFINITE_NS, Assignment, LayerView
from policies.papers.dali.parts import BeamAssigner, GreedyAssigner
from policies.parts.assigners import CostRule, LoadAll, ResidentOrCpu, ThresholdAssigner, break_even
from policies.parts.exact_assignment import ExactAssigner
from policies.parts.objective import durations, makespan
from policies.protocols import Assigner
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
