"""The pipelined assignment: against every choice there is, on an event-by-event replay of the layer's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.shared_dram import rates_together
from policies.mechanism.views import INFINITE_NS, Assignment, LayerView
from policies.parts.assigners import LoadAll, ResidentOrCpu
from policies.parts.objective import together
from policies.parts.pipeline_assigner import PipelineAssigner
from tests.kit.views import costs, view


def timeline(layer: LayerView, assignment: Assignment) -> Fraction:
    """Makespan of a plan: the link copies in order while the CPU works, each at its rate while both are busy."""
    table, workload = layer.costs[layer.layer], layer.routing.workload()
    copies = [table.copy_ns] * len(assignment.loads)
    late = [e for e in assignment.gpu if 0 < layer.ready_ns[e] < INFINITE_NS]
    link = [layer.h2d_backlog_ns, *copies]
    cpu = (
        layer.cpu_backlog_ns
        + table.exchange_ns
        + table.first_cpu_ns
        + sum(table.cpu_ns[workload[e]] for e in assignment.cpu)
    )
    reads = cpu - sum(table.cpu_ns[workload[e]] - table.cpu_ns[1] for e in assignment.cpu)
    rates = rates_together(table, cpu, reads)
    ends, cpu_end = replay([Fraction(ns) for ns in link], Fraction(cpu if assignment.cpu else 0), rates)
    arrival = dict(zip([late[0] if late else -1, *assignment.loads], ends, strict=True))
    gpu = launched = Fraction(table.first_gpu_ns if set(assignment.gpu) - set(arrival) else 0)  # once for those there
    for expert in assignment.gpu:
        own_ns, alone_ns = table.gpu_ns[workload[expert]], table.first_gpu_ns if expert in arrival else 0
        launched += max(own_ns, table.launch_ns) + alone_ns
        gpu = max(gpu, arrival.get(expert, Fraction(0))) + own_ns + alone_ns
    return max(gpu, launched, cpu_end)


def replay(link: list[Fraction], cpu: Fraction, rates: tuple[int, int]) -> tuple[list[Fraction], Fraction]:
    """When each copy and the CPU's work end."""
    cpu_rate, contended = (Fraction(rate, 1000) for rate in rates)
    now, ends, cpu_end = Fraction(0), [], Fraction(0)
    for copy in link:
        while copy > 0:
            both = cpu > 0
            link_rate = contended if both else Fraction(1)
            lasts = min(copy / link_rate, cpu / cpu_rate) if both else copy
            now, copy = now + lasts, copy - lasts * link_rate
            if both:
                cpu -= lasts * cpu_rate
                cpu_end = now if cpu == 0 else cpu_end
        ends.append(now)
    return ends, (now + cpu if cpu > 0 else cpu_end)


def choices(layer: LayerView) -> list[Assignment]:
    """Every split of the active experts, each side by descending workload, residents before the rest."""
    workload, ready = layer.routing.workload(), layer.ready_ns
    order = sorted(workload, key=lambda e: (ready[e] > 0, ready[e] == INFINITE_NS, -workload[e], e))
    found = []
    for sides in product((True, False), repeat=len(order)):
        gpu = tuple(e for e, side in zip(order, sides, strict=True) if side)
        cpu = tuple(e for e, side in zip(order, sides, strict=True) if not side)
        found.append(Assignment(gpu, cpu, tuple(e for e in gpu if ready[e] == INFINITE_NS), 0))
    return found


@st.composite
def layers(draw: st.DrawFn, flat_gpu: bool, copy_rates: Sequence[int] = (1000, 600)) -> LayerView:
    """Up to 6 active experts, at most one of them on its way."""
    gpu = (
        [draw(st.integers(1, 30))] * 5
        if flat_gpu
        else sorted(draw(st.lists(st.integers(1, 30), min_size=5, max_size=5)))
    )
    cpu = sorted(draw(st.lists(st.integers(1, 60), min_size=5, max_size=5)))
    first_gpu_ns = draw(st.integers(0, 20))
    copy_ns = draw(st.integers(max(gpu) + first_gpu_ns, 60))  # no shorter than what it is for
    table = costs(gpu, cpu, first_cpu_ns=draw(st.integers(0, 20)), copy_ns=copy_ns)
    table = table._replace(
        exchange_ns=draw(st.integers(0, 20)),
        first_gpu_ns=first_gpu_ns,
        launch_ns=draw(st.integers(0, 20)),
        cpu_permille=draw(st.sampled_from((1000, 700))),
        copy_permille=draw(st.sampled_from(copy_rates)),
    )
    workload = draw(st.dictionaries(st.integers(0, 9), st.integers(1, 5), min_size=1, max_size=6))
    experts = sorted(workload)
    ready = {e: 0 for e in experts if draw(st.booleans())}
    backlog = draw(st.integers(0, 50))
    absent = [e for e in experts if e not in ready]
    if absent and backlog and draw(st.booleans()):
        ready[absent[0]] = backlog
    return view(workload, table, ready=ready)._replace(h2d_backlog_ns=backlog, cpu_backlog_ns=draw(st.integers(0, 20)))


@given(layers(flat_gpu=True, copy_rates=(1000,)))
def test_no_choice_is_better_where_the_gpu_takes_the_same_time_for_every_workload(layer: LayerView) -> None:
    found = timeline(layer, PipelineAssigner().assign(layer))
    best = min(timeline(layer, choice) for choice in choices(layer))
    assert found - best <= 3  # whole ns: each of the two rates rounds down


@given(layers(flat_gpu=False))
def test_the_makespan_is_that_of_the_plan_and_never_worse_than_staying_or_loading_all(layer: LayerView) -> None:
    chosen = PipelineAssigner().assign(layer)
    found = timeline(layer, chosen)
    assert abs(found - chosen.makespan_ns) <= 3
    for other in (LoadAll(), ResidentOrCpu()):
        assert found <= timeline(layer, other.assign(layer)) + 3


def test_two_absent_experts_one_on_either_side() -> None:
    """Copy 3, GPU 1, CPU 4: loading both takes 7, neither 8, one 4."""
    layer = view({0: 1, 1: 1, 2: 1}, costs([1], [4], copy_ns=3), ready={2: 0})
    assert PipelineAssigner().assign(layer) == Assignment((2, 0), (1,), (0,), 4)


def test_a_load_may_count_less_than_its_copy_takes() -> None:
    """Copy 6, GPU 1, CPU 4: by itself the load takes 7. With half of the copy it takes 4, as the CPU does, with less
    than that it is loaded."""
    layer = view({0: 1}, costs([1], [4], copy_ns=6), ready={})
    assert [PipelineAssigner(weight).assign(layer).loads for weight in (1.0, 0.5, 0.4)] == [(), (), (0,)]


def test_who_is_on_its_way_for_too_long_runs_on_the_cpu() -> None:
    layer = view({0: 1}, costs([1], [4], copy_ns=9), ready={0: 8})._replace(h2d_backlog_ns=8)
    assert PipelineAssigner().assign(layer) == Assignment((), (0,), (), 4)


def test_an_idle_cpu_takes_residents_over_from_a_busy_gpu() -> None:
    layer = view({0: 1, 1: 1, 2: 1, 3: 1}, costs([3], [3], copy_ns=9), ready=dict.fromkeys(range(4), 0))
    chosen = PipelineAssigner().assign(layer)
    assert (len(chosen.gpu), len(chosen.cpu), chosen.makespan_ns) == (2, 2, 6)


def test_experts_that_are_launched_more_slowly_than_they_run_take_as_long_as_their_launches() -> None:
    """GPU 1, launch 4, CPU 5: three on the GPU would take 12, one and two 10, two and one 8."""
    table = costs([1], [5], copy_ns=90)
    layer = view({0: 1, 1: 1, 2: 1}, table, ready=dict.fromkeys(range(3), 0))
    assert PipelineAssigner().assign(layer) == Assignment((0, 1, 2), (), (), 3)
    layer = layer._replace(costs=(table._replace(launch_ns=4),))
    assert PipelineAssigner().assign(layer) == Assignment((0, 1), (2,), (), 8)


def test_a_loaded_expert_is_launched_before_it_arrives() -> None:
    """Copy 9, launch 4, GPU 1: it ends at 10. With two residents launched first, the third launch ends at 12."""
    table = costs([1], [30], copy_ns=9)._replace(launch_ns=4)
    assert PipelineAssigner().assign(view({0: 1}, table)) == Assignment((0,), (), (0,), 10)
    three = view({0: 1, 1: 1, 2: 1}, table, ready={0: 0, 1: 0})
    assert PipelineAssigner().assign(three) == Assignment((0, 1, 2), (), (2,), 12)


def test_among_equals_residents_stay_on_the_gpu() -> None:
    layer = view({0: 1, 1: 1}, costs([3], [6], copy_ns=9), ready={0: 0, 1: 0})
    assert PipelineAssigner().assign(layer) == Assignment((0, 1), (), (), 6)


def test_together_each_is_slowed_down_while_the_other_works() -> None:
    """At half speed: the CPU's 10 take 20, in which 12 of the copies' 30 are done at 60 %; 18 are left."""
    both = costs([1], [1], copy_ns=1)._replace(cpu_permille=500, copy_permille=600)
    assert together(both, 10, 10, 30) == (20, 38)
    assert together(both, 30, 30, 6) == (35, 10)
    assert together(both, 0, 0, 6) == (0, 6)
    assert together(both, 30, 10, 6) == (30, 7)  # reads a third of its time: full speed; the copy at 0.767


def test_a_cpu_that_is_not_needed_is_not_brought_in_for_less_than_its_transfers() -> None:
    table = costs([3], [3], copy_ns=9)
    layer = view({0: 1, 1: 1}, table, ready=dict.fromkeys(range(2), 0))
    assert PipelineAssigner().assign(layer).makespan_ns == 3
    layer = layer._replace(costs=(table._replace(exchange_ns=4),))
    assert PipelineAssigner().assign(layer) == Assignment((0, 1), (), (), 6)
