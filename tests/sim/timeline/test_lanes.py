"""Lanes that are reserved ahead: host, GPU and CPU, with what their neighbours take from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.mechanism.views import ExpertCosts
from sim.runs.spans import Span, SpanRecorder
from sim.timeline.clock import Clock
from sim.timeline.cpu_lane import CpuLane
from sim.timeline.gpu_lane import GpuLane
from sim.timeline.lanes import Lane, Neighbour, SharedMemory
from tests.kit.clocks import call_at
from tests.kit.toys import uniform_costs

CPU, H2D = SharedMemory.CPU, SharedMemory.H2D


# --- lanes that are reserved ahead ------------------------------------------------------------------------------------


def test_a_span_starts_when_it_is_ready_and_the_lane_free() -> None:
    recorder = SpanRecorder()
    lane = Lane("gpu", recorder)
    ends = [
        lane.reserve(3, 10, "attention", 0),  # lane free 0, ready 3
        lane.reserve(3, 2, "gate", 0),  # lane free 13
        lane.reserve(20, 5, "expert", 0, 7, 4, 100),  # lane free 15, ready 20
        lane.reserve(0, 1, "combine", 0),  # lane free 25
    ]
    assert ends == [13, 15, 25, 26]
    log = [(s.ready_ns, s.start_ns, s.end_ns, s.kind) for s in (Span(*row) for row in recorder.rows)]
    assert log == [(3, 3, 13, "attention"), (3, 13, 15, "gate"), (20, 20, 25, "expert"), (0, 25, 26, "combine")]


def test_a_span_says_what_it_was_for() -> None:
    recorder = SpanRecorder()
    recorder.step, recorder.phase = 4, "decode"
    Lane("d2h", recorder).reserve(0, 5, "routing", 2, 7, 3, 144, target_layer=3)
    assert [Span(*row) for row in recorder.rows] == [Span("d2h", 0, 0, 5, "routing", "decode", 4, 2, 3, 7, 3, 144)]


def test_a_span_of_no_expert_has_no_tokens_and_no_bytes() -> None:
    recorder = SpanRecorder()
    Lane("d2h", recorder).reserve(3, 10, "routing", 0)
    gpu_lane(recorder).run(3, 0, 10, "attention", 0)
    assert [Span(*row) for row in recorder.rows] == [
        Span("d2h", 3, 3, 13, "routing", "prefill", -1, 0, -1, -1, 0, 0),
        Span("gpu", 3, 3, 13, "attention", "prefill", -1, 0, -1, -1, 0, 0),
    ]


# GPU time of an expert by its tokens, and of the kernels that a layer's experts share.
EXPERTS = uniform_costs(1).experts[0]._replace(gpu_ns=(0, 9, 30, 2), first_gpu_ns=3)


def gpu_lane(recorder: SpanRecorder, *neighbours: Neighbour, lead_ns: int | None = None, tail_ns: int = 0) -> GpuLane:
    costs = uniform_costs(1, expert_launch_ns=5, first_expert_launch_ns=2)
    costs = replace(costs, experts=(EXPERTS,), lead_ns=lead_ns, tail_ns=tail_ns)
    return GpuLane(Lane("host", recorder), costs, neighbours)


def test_a_span_of_no_length_leaves_the_lane_free() -> None:
    lane = Lane("host", SpanRecorder())
    assert (lane.reserve(5, 0, "plan", 0), lane.reserve(0, 2, "launch", 0), lane.free_ns) == (5, 7, 7)


def test_a_span_that_lasts_until_it_has_been_launched_keeps_the_lane_until_then() -> None:
    gpu = gpu_lane(SpanRecorder())
    assert [gpu.run(3, launched_ns, 10, "gate", 0) for launched_ns in (0, 20, 25)] == [13, 23, 33]
    assert gpu.run(3, 50, 10, "gate", 0) == gpu.free_ns == 50


@pytest.mark.parametrize("lead_ns", [None, 0, 4, 9])
@pytest.mark.parametrize("neighbours", [(), (Neighbour(500, lambda: 60),)], ids=["alone", "slowed"])
def test_a_group_of_experts_is_launched_and_run_as_one_after_another_would_be(
    lead_ns: int | None, neighbours: tuple[Neighbour, ...]
) -> None:
    """Bound by the GPU, by the launches, and by the tail."""
    one, all_ = SpanRecorder(), SpanRecorder()
    gpu, group = (gpu_lane(rows, *neighbours, lead_ns=lead_ns, tail_ns=3) for rows in (one, all_))
    ends_ns = []
    for expert, tokens, launch_ns, gpu_ns in [(3, 1, 7, 12), (5, 3, 5, 2), (0, 2, 5, 30)]:
        launch = gpu.launch(10, launch_ns, 0, expert)
        ends_ns.append(gpu.run(*launch, gpu_ns, "expert", 0, expert, tokens, 100))
    assert group.run_group(10, 0, (3, 5, 0), {0: 2, 3: 1, 5: 3}) == ends_ns
    assert (all_.rows, group.free_ns) == (one.rows, gpu.free_ns)
    group.slow_down(40)
    gpu.slow_down(40)
    assert all_.rows == one.rows
    assert group.run_group(99, 0, (), {}) == []


def test_what_copies_add_counts_before_a_span_is_drawn_out() -> None:
    gpu = gpu_lane(SpanRecorder(), Neighbour(500, lambda: 100))  # copies run until 100
    assert gpu.run(0, 30, 20, "expert", 0) == 40
    assert gpu.run(0, 90, 20, "expert", 0) == 90


def test_a_gpu_that_shares_memory_takes_longer_by_what_it_overlaps_with_copies() -> None:
    gpu = gpu_lane(SpanRecorder(), Neighbour(500, lambda: 150))  # copies run until 150, as far as is known
    assert gpu.run(100, 0, 20, "expert", 0) == 140  # half as fast while copies run: 40 ns
    assert gpu.run(100, 0, 20, "expert", 0) == 140 + 20 + 5  # beside them for 10 ns, in which 5 are done
    assert gpu.run(100, 0, 20, "expert", 0) == 165 + 20  # they are over
    assert gpu.run(200, 0, 0, "combine", 0) == 200


def test_a_gpu_that_shares_memory_and_cores_is_slowed_by_copies_and_by_experts_on_the_cpu() -> None:
    gpu = gpu_lane(SpanRecorder(), Neighbour(500, lambda: 20), Neighbour(800, lambda: 100))
    assert gpu.run(0, 0, 30, "expert", 0) == 50  # 20 next to copies do 10; 40 next to the CPU's experts take 50


def test_what_the_gpu_is_at_is_slowed_by_what_begins_meanwhile() -> None:
    recorder, until = SpanRecorder(), 0
    gpu = gpu_lane(recorder, Neighbour(500, lambda: until))
    gpu.run(0, 0, 10, "gate", 0)
    gpu.run(0, 0, 30, "shared", 0)
    until = 200
    gpu.slow_down(20)  # 20 of its 30 ns are left
    assert gpu.free_ns == 60
    assert [row[2:4] for row in recorder.rows] == [(0, 10), (10, 60)]
    gpu.slow_down(60)  # nothing is left
    assert gpu.free_ns == 60
    gpu.run(70, 0, 10, "combine", 0)
    assert gpu.free_ns == 90  # that they are at work was known
    gpu.slow_down(65)
    gpu.slow_down(80)
    assert gpu.free_ns == 90


def slowed_cpu(gpu_until: int) -> list[tuple[int, int]]:
    """When two experts of 100 ns start and end, given at 10, on a CPU that is half as fast until ``gpu_until``."""
    clock, recorder = Clock(), SpanRecorder()
    memory = SharedMemory(clock)
    costs = [ExpertCosts((0, 1), (0, 100), 0, 1, 1)]
    cpu = CpuLane(clock, memory, recorder, costs, Neighbour(500, lambda: gpu_until), lambda target: None)
    cpu.add("expert", (0, 1), {0: 1, 1: 1}, 10, 0)
    assert cpu.until_ns() == 210  # as far as is known before they start
    clock.play()
    return [(span.start_ns, span.end_ns) for span in (Span(*row) for row in recorder.rows)]


def test_experts_on_the_cpu_take_longer_by_what_they_overlap_with_work_that_the_gpu_has_been_given() -> None:
    assert slowed_cpu(0) == [(10, 110), (110, 210)]
    assert slowed_cpu(70) == [(10, 140), (140, 240)]  # 60 ns, in which 30 are done
    assert slowed_cpu(250) == [(10, 210), (210, 330)]  # the first takes 200, the second 40 longer for 20


def test_until_when_the_cpu_is_busy_counts_each_batch_from_when_it_is_ready_or_the_one_before_it_ended() -> None:
    clock = Clock()
    costs = [ExpertCosts((0, 1), (0, 100), 0, 1, 1)]
    alone = Neighbour(1000, lambda: 0)
    cpu = CpuLane(clock, SharedMemory(clock), SpanRecorder(), costs, alone, lambda target: None)
    seen = list[int]()
    for at in (0, 30, 60, 250):
        call_at(clock, at, lambda: seen.append(cpu.until_ns()))
    for experts, ready in (((0, 1), 0), ((2,), 50), ((3,), 400)):
        cpu.add("expert", experts, dict.fromkeys(experts, 1), ready, 0)
    clock.play()
    assert seen == [500] * 4  # 0-200; ready at 50 and done at 300; 400-500
    assert cpu.until_ns() == 500


def test_each_expert_on_the_cpu_shares_the_dram_as_its_workload_does() -> None:
    """Next to a copy an expert of one token runs at half its rate, one of four, bound by arithmetic, at its own."""
    clock, recorder = Clock(), SpanRecorder()
    memory = SharedMemory(clock)
    costs = [ExpertCosts((0, 1, 1, 1, 1), (0, 10, 10, 10, 40), 0, 10, 1, cpu_permille=500, copy_permille=600)]
    cpu = CpuLane(clock, memory, recorder, costs, Neighbour(1000, lambda: 0), lambda target: None)
    copied, seen = list[int](), list[int]()
    memory.start(H2D, (100,), copied.extend)
    cpu.add("expert", (0, 1, 2, 3), {0: 4, 1: 4, 2: 1, 3: 2}, 0, 0)
    for at in (0, 90):
        call_at(clock, at, lambda: seen.append(cpu.remaining_ns()))
    clock.play()
    assert [span.end_ns for span in (Span(*row) for row in recorder.rows)] == [40, 80, 100, 120]
    # copy: 4 tokens draw 0.25 of 1, 0.25 less than next to 1 token: 0.6 + 0.25 for 80 ns, then 0.6 for 40, 8 alone
    assert copied == [128]
    assert seen == [100, 10 + 10]
