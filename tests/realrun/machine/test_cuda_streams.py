"""Calls of the CUDA machine to a device, its reading of the device's clock, and flags: on a fake, call by call."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realrun.errors import LaneError
from realrun.machine.cuda_lanes import POLL_S
from realrun.machine.cuda_memory import VARIABLE, driver_wait_value
from tests.kit.fake_cuda import GB, FakeCuda
from tests.kit.fake_torch import fake_machine


def bytes_on(place: Callable[..., torch.Tensor], size: int) -> torch.Tensor:
    return place((size,), torch.uint8)


class TestWhatIsSaidToTheDevice:
    def test_the_whole_log_of_a_layer(self, cuda):
        with fake_machine(cuda, chunk_bytes=4) as machine:
            slot, host = bytes_on(machine.gpu_tensor, 8), bytes_on(machine.host_tensor, 8)
            cuda.log.clear()
            copy = machine.copy_in(slot, host)
            expert = machine.gpu.submit(lambda: slot.add_(1), (copy,), done=lambda: None)
            machine.d2h.submit(lambda: host.copy_(slot, non_blocking=True), (expert,))
            assert cuda.log == [
                ("record", "link"),
                ("do", "link", "copy_"),
                ("do", "link", "copy_"),
                ("record", "link"),
                ("wait", "gpu", "link"),
                ("record", "gpu"),
                ("do", "gpu", "add_"),
                ("record", "gpu"),
                ("wait", "d2h", "gpu"),
                ("record", "d2h"),
                ("do", "d2h", "copy_"),
                ("record", "d2h"),
            ]

    def test_launching_and_copying_do_not_wait(self, cuda):
        with fake_machine(cuda) as machine:
            slot, host = bytes_on(machine.gpu_tensor, 8).zero_(), bytes_on(machine.host_tensor, 8).fill_(3)
            with cuda.held():
                copy = machine.copy_in(slot, host)
                machine.gpu.submit(lambda: slot.add_(1), (copy,), done=lambda: None)
                assert slot.tolist() == [0] * 8
            machine.settle()
            assert slot.tolist() == [4] * 8

    def test_a_flag_is_waited_for_before_the_work_that_needs_it_and_only_once(self, cuda):
        may_go_on = threading.Event()
        with fake_machine(cuda) as machine:
            host, slot = bytes_on(machine.host_tensor, 8), bytes_on(machine.gpu_tensor, 8)
            cuda.log.clear()
            sent = machine.d2h.submit(lambda: host.copy_(slot, non_blocking=True))
            on_cpu = machine.cpu.submit(lambda: may_go_on.wait(60), (sent,))
            machine.gpu.submit(lambda: slot.add_(1), (on_cpu,))
            assert cuda.log[-5:] == [
                ("wait", "gpu", "d2h"),  # CUDA must see what the CPU waits for, too
                ("flag", "gpu", "1"),
                ("record", "gpu"),
                ("do", "gpu", "add_"),
                ("record", "gpu"),
            ]
            may_go_on.set()
            on_cpu.wait()
            cuda.log.clear()
            machine.gpu.submit(lambda: slot.add_(1), (on_cpu,))
            assert [entry[0] for entry in cuda.log] == ["record", "do", "record"]

    def test_the_last_flag_stands_for_all_and_what_they_wait_for_is_waited_for_once(self, cuda):
        may_go_on = threading.Event()
        with fake_machine(cuda) as machine:
            host, slot = bytes_on(machine.host_tensor, 8), bytes_on(machine.gpu_tensor, 8)
            sent = machine.d2h.submit(lambda: host.copy_(slot, non_blocking=True))
            experts = [machine.cpu.submit(lambda: may_go_on.wait(60), (sent,)) for _ in range(3)]
            cuda.log.clear()
            machine.gpu.submit(lambda: None, (experts[2], experts[0], experts[1]))
            assert cuda.log[:-2] == [("wait", "gpu", "d2h"), ("flag", "gpu", "3")]
            may_go_on.set()
            machine.settle()

    def test_no_thread_but_the_host_gives_a_stream_anything_to_take_its_time(self, cuda, monkeypatch):
        monkeypatch.setattr("realrun.machine.cuda_streams.BASE_LIFE_NS", -1)
        with fake_machine(cuda) as machine:
            sent = machine.d2h.submit(lambda: None)
            cuda.log.clear()
            machine.cpu.submit(lambda: None, (sent,)).wait()
            assert cuda.log == []  # or it could lie behind a flag that this very thread is to set
            sent.wait()
            assert ("record", "clock") in cuda.log

    def test_waiting_does_not_read_the_clock_of_the_device(self, cuda, monkeypatch):
        with fake_machine(cuda) as machine:
            completion = machine.gpu.submit(lambda: None)
            monkeypatch.setattr("tests.kit.fake_cuda.FakeEvent.elapsed_time", lambda *_: 1 / 0)
            completion.wait()
            with pytest.raises(ZeroDivisionError):
                _ = completion.start_ns

    def test_a_callback_that_another_thread_is_calling_is_waited_for_but_polling_is_not(self, cuda):
        begun, may_go_on, told = threading.Event(), threading.Event(), []
        with fake_machine(cuda) as machine:
            completion = machine.gpu.submit(
                lambda: None, done=lambda: (begun.set(), may_go_on.wait(60), told.append(1))
            )
            other = threading.Thread(target=completion.wait)
            other.start()
            begun.wait(60)
            assert machine.poll() == POLL_S
            may_go_on.set()
            completion.wait()
            assert told == [1]
            other.join()

    def test_nothing_waits_for_what_is_known_to_have_ended(self, cuda):
        with fake_machine(cuda) as machine:
            completion = machine.gpu.submit(lambda: None)
            completion.wait()
            cuda.log.clear()
            machine.d2h.submit(lambda: None, (completion,))
            assert [entry[0] for entry in cuda.log] == ["record", "record"]

    def test_the_host_thread_works_on_the_compute_stream_until_the_end(self, cuda):
        with fake_machine(cuda) as machine:
            assert torch.cuda.current_stream() is cuda.stream("gpu")
            machine.close()
            assert torch.cuda.current_stream() == "default"

    def test_the_copy_thread_uses_the_same_device(self, cuda):
        with fake_machine(cuda, device_index=1) as machine:
            with ThreadPoolExecutor(1, initializer=machine.begin_copying) as link:
                link.submit(lambda: None).result()
            assert cuda.log == [("set_device", "cuda:1")]

    def test_an_error_of_the_device_stops_the_lanes(self, cuda):
        with fake_machine(cuda) as machine:
            completion = machine.gpu.submit(lambda: None)
            cuda.error = RuntimeError("CUDA error: device-side assert triggered")
            with pytest.raises(LaneError, match="the GPU reports: CUDA error: device-side assert"):
                completion.wait()
            with pytest.raises(LaneError, match="the gpu lane has stopped: the GPU reports"):
                machine.settle()

    @given(size=st.integers(1, 40), chunk=st.integers(0, 50), room=st.integers(0, 5))
    @settings(max_examples=30, deadline=None)
    def test_a_copy_in_chunks_is_the_whole_copy(self, size, chunk, room):
        cuda = FakeCuda()
        with fake_machine(cuda, chunk_bytes=chunk) as machine:
            source, target = bytes_on(machine.host_tensor, size), bytes_on(machine.gpu_tensor, size + room)
            source.random_()
            machine.copy_in(target, source).wait()
            assert target.tolist() == source.tolist() + [0] * room
            assert len([entry for entry in cuda.log if entry[0] == "do"]) == -(-size // (chunk or size))

    @given(
        program=st.lists(
            st.tuples(st.sampled_from(["gpu", "d2h", "back", "link", "cpu"]), st.integers(0, 2), st.integers(0, 2)),
            max_size=12,
        ),
        op_ns=st.tuples(*[st.sampled_from([1, 1000, 10_000_000])] * 4),
    )
    @settings(max_examples=30, deadline=None)
    def test_lanes_that_wait_for_what_they_read_and_write_compute_what_one_lane_would(self, program, op_ns):
        cuda = FakeCuda()
        expected, last = [1, 2, 3], {}
        with fake_machine(cuda) as machine:
            cells = [bytes_on(machine.host_tensor, 1).fill_(value) for value in expected]
            for lane, time in zip(("gpu", "d2h", "back", "link"), op_ns, strict=True):
                cuda.stream(lane).op_ns = time
            for lane, source, target in program:
                after = [last[cell] for cell in {source, target} if cell in last]
                completion = getattr(machine, lane).submit(lambda s=source, t=target: cells[t].add_(cells[s]), after)
                last |= {source: completion, target: completion}
                expected[target] = (expected[target] + expected[source]) % 256
            machine.settle()
            assert [int(cell) for cell in cells] == expected


class TestTimes:
    def test_are_those_of_the_hosts_clock(self, cuda):
        with fake_machine(cuda) as machine:
            cuda.now_ns = 5_000_000
            machine.rebase()
            value = machine.gpu_tensor((1,), torch.float32)
            cuda.now_ns = 6_000_000
            one = machine.gpu.submit(lambda: value.add_(1))  # 1000 ns
            cuda.now_ns = 6_000_400
            other = machine.gpu.submit(lambda: value.add_(1))
            both = machine.d2h.submit(lambda: None, (one,))
            for completion in (one, other, both):
                completion.wait()
            assert [(each.ready_ns, each.start_ns, each.end_ns) for each in (one, other, both)] == [
                (6_000_000, 6_000_000, 6_001_000),
                (6_000_400, 6_001_000, 6_002_000),
                (6_001_000, 6_001_000, 6_001_000),
            ]

    def test_count_from_the_quickest_of_several_bases(self, cuda):
        with fake_machine(cuda) as machine:
            cuda.delays_ns.extend([9000, 8000, 2000, 7000, 9000])
            machine.rebase()
            launched_ns = cuda.now_ns = cuda.now_ns + 1_000_000
            completion = machine.gpu.submit(lambda: None)
            completion.wait()
            assert completion.start_ns == launched_ns + 2000  # the host cannot learn of it sooner

    def test_stay_right_over_a_long_run_though_clocks_drift(self):
        cuda = FakeCuda(drift=50e-6)
        with fake_machine(cuda) as machine:
            for second in range(0, 3600, 60):
                cuda.now_ns = second * GB + 1_000_000
                machine.gpu.submit(lambda: None).wait()  # waiting takes a new base where the old one has aged
                cuda.now_ns += 50_000_000
                completion = machine.gpu.submit(lambda: None)
                completion.wait()
                assert abs(completion.start_ns - (second * GB + 51_000_000)) <= 3000

    def test_would_not_without_new_bases(self, monkeypatch):
        monkeypatch.setattr("realrun.machine.cuda_streams.GpuClock.refresh", lambda self: None)
        with pytest.raises(AssertionError):
            self.test_stay_right_over_a_long_run_though_clocks_drift()

    def test_are_compared_anew_when_the_machine_settles(self):
        cuda = FakeCuda(drift=50e-6)
        with fake_machine(cuda) as machine:
            cuda.now_ns += GB
            machine.settle()
            given_ns = cuda.now_ns
            assert machine.gpu.submit(lambda: None).start_ns == given_ns == machine.now_ns()

    def test_never_say_that_work_started_before_it_could(self):
        cuda = FakeCuda(drift=-50e-6)
        with fake_machine(cuda) as machine:
            cuda.now_ns += 50_000_000
            completion = machine.gpu.submit(lambda: None)
            assert completion.ready_ns == completion.start_ns < cuda.now_ns

    def test_of_work_launched_before_a_new_base_keep_their_own(self, cuda):
        with fake_machine(cuda) as machine:
            completion = machine.gpu.submit(lambda: None)
            submitted = cuda.now_ns
            cuda.now_ns += GB
            machine.settle()
            assert (completion.start_ns, completion.end_ns) == (submitted, submitted)


def driver(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """A driver's library with these functions."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**functions))


def test_the_function_of_today_s_drivers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace()
    driver(monkeypatch, cuStreamWaitValue32=SimpleNamespace(), cuStreamWaitValue32_v2=found)
    assert driver_wait_value() is found
    assert found.argtypes == [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]


def test_an_older_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, cuStreamWaitValue32=SimpleNamespace())
    assert driver_wait_value() is None


def test_no_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert driver_wait_value() is None


def test_the_environment_can_do_without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, cuStreamWaitValue32_v2=SimpleNamespace())
    monkeypatch.setenv(VARIABLE, "0")
    assert driver_wait_value() is None
