"""The machine made of threads: its settings, its paced link, its end."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realrun.errors import LaneError, RefusedError
from realrun.machine.host_lanes import HostLanes
from tests.kit.tiny_bench import OverTheLink, cores, machine, tiny_lanes

pytestmark = pytest.mark.timeout(60)
NOWHERE = 10_000  # a core that no computer has


@pytest.mark.parametrize(("changes", "message"), [
    ({"gpu_core": NOWHERE}, r"expected cores among \[.*\], got \[10000\]"),
    ({"cpu_cores": (NOWHERE,)}, r"got \[10000\]"),
    ({"cpu_cores": ()}, "got none for the CPU"),
    ({"link_bytes_per_s": 0}, "must be above 0"),
    ({"chunk_bytes": 0}, "must be above 0"),
])
def test_what_is_no_machine_is_refused(changes: dict[str, Any], message: str) -> None:
    before = threading.active_count()
    with pytest.raises(RefusedError, match=message):
        HostLanes(tiny_lanes(**changes))
    assert threading.active_count() == before


def test_both_lanes_may_share_a_core() -> None:
    core, seen = cores()[0], list[set[int]]()
    with machine(gpu_core=core, cpu_cores=(core,)) as lanes:
        for lane in (lanes.gpu, lanes.cpu):
            lane.submit(lambda: seen.append(os.sched_getaffinity(threading.get_native_id())))
        lanes.settle()
    assert seen == [{core}, {core}]


# --- the link ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(1, 5000), st.integers(1, 2000), st.sampled_from([1e6, 1e7]), st.integers(0, 100_000))
def test_the_link_is_never_faster_than_it_is_made_and_all_bytes_arrive(
    size: int, chunk: int, rate: float, latency_ns: int
) -> None:
    with machine(link_bytes_per_s=rate, chunk_bytes=chunk, link_latency_ns=latency_ns) as lanes:
        source = torch.randint(0, 256, (size,), dtype=torch.uint8)
        target = lanes.gpu_tensor((size,), torch.uint8)
        completion = lanes.copy_in(target, source)
        assert completion.end_ns - completion.start_ns >= latency_ns + size / rate * 1e9 - 1000  # clock grain
        assert torch.equal(target, source)


def test_a_copy_leaves_what_lies_beside_its_slot_alone() -> None:
    with machine(chunk_bytes=3) as lanes:
        arena = lanes.gpu_tensor((3, 8), torch.uint8)
        lanes.copy_in(arena[1], torch.full((8,), 9, dtype=torch.uint8))
        assert arena.tolist() == [[0] * 8, [9] * 8, [0] * 8]


# --- memory, clock, end -----------------------------------------------------------------------------------------------


def test_host_memory_is_what_the_gpu_reads() -> None:
    with machine() as lanes:
        host = lanes.host_tensor((2, 3), torch.float32)
        assert (host.shape, host.dtype, host.sum().item()) == ((2, 3), torch.float32, 0)
        assert lanes.readable(host).data_ptr() == host.data_ptr()


def test_the_clock_of_marks_is_the_machines() -> None:
    with machine() as lanes:
        before = lanes.now_ns()
        completion = lanes.gpu.submit(lambda: None)
        completion.wait()
        assert before <= completion.ready_ns <= completion.start_ns <= completion.end_ns <= lanes.now_ns()


def test_settling_waits_for_all_lanes() -> None:
    with machine() as lanes:
        log: list[str] = []
        lanes.gpu.submit(lambda: log.append("gpu"), (lanes.cpu.submit(lambda: log.append("cpu")),))
        lanes.back.submit(lambda: log.append("back"))
        lanes.settle()
        assert sorted(log) == ["back", "cpu", "gpu"]


def test_settling_waits_for_all_lanes_also_if_one_has_failed() -> None:
    with machine() as lanes:
        gate, log = threading.Event(), []
        lanes.gpu.submit(lambda: 1 / 0)
        lanes.back.submit(lambda: (gate.wait(), log.append("back")))
        threading.Timer(0.01, gate.set).start()
        with pytest.raises(LaneError, match="ZeroDivisionError"):
            lanes.settle()
        assert log == ["back"]


@pytest.mark.parametrize("lane", ["d2h", "link"])
def test_settling_tells_of_failures_in_the_calling_thread_too(lane: str) -> None:
    with machine() as lanes:
        with pytest.raises(LaneError):
            getattr(lanes, lane).submit(lambda: 1 / 0)
        with pytest.raises(LaneError, match="ZeroDivisionError"):
            lanes.settle()


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    with machine():
        assert threading.active_count() == before + 3
    assert threading.active_count() == before


def test_inline_the_calling_thread_is_the_gpu() -> None:
    lanes, seen = HostLanes(tiny_lanes(), inline=True), []
    lanes.gpu.submit(lambda: seen.append(threading.current_thread()))
    lanes.settle()
    lanes.close()
    assert seen == [threading.current_thread()]


def test_what_a_machine_is_can_be_said() -> None:
    with machine(OverTheLink) as lanes:
        assert (lanes.kind, lanes.device.type, lanes.result_path) == ("host-lanes", "cpu", "h2d")
        assert all(lanes.facts().values())


# --- several GPUs -----------------------------------------------------------------------------------------------------


def test_each_gpu_has_lanes_of_its_own_and_the_cpu_in_common() -> None:
    before = threading.active_count()
    with machine() as lanes:
        alone = threading.active_count()
        assert lanes.card(0) is lanes
        second, third = lanes.card(1), lanes.card(2)
        assert threading.active_count() == alone + 2 * 2  # a GPU and write-backs each
        assert lanes.card(2) is third
        assert len({each.gpu for each in (lanes, second, third)}) == 3
        assert {each.cpu for each in (lanes, second, third)} == {lanes.cpu}
    assert threading.active_count() == before
