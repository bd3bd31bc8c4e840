"""The lanes of a CUDA machine: what holds on any device, on a fake one and, where there is one, on a real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from realrun.errors import LaneError, RefusedError
from realrun.machine.cuda_lanes import POLL_S, REST_S, CudaLanes, CudaSettings
from realrun.machine.cuda_memory import StreamFlag
from realrun.machine.cuda_streams import StreamCompletion
from tests.kit.fake_cuda import GB, FakeCuda
from tests.kit.fake_torch import fake_machine, install

SLOW_NS = 10_000_000
Slow = Callable[[str], Callable[[], object]]


class LaneLaws:
    """Laws of lanes on any device. ``slow(lane)`` makes what follows in the same work take long."""

    def test_work_waits_for_the_copy_that_it_needs(self, machine, slow):
        source, slot, seen = self.host(machine, 7), self.gpu(machine), self.gpu(machine)
        linger = slow("link")
        copy = machine.link.submit(lambda: (linger(), slot.copy_(source, non_blocking=True)))
        machine.gpu.submit(lambda: seen.copy_(slot), (copy,)).wait()
        assert seen.tolist() == [7] * 8

    def test_intermediate_results_are_made_of_what_arrived(self, machine, slow):
        source, slot, seen = self.host(machine, 7), self.gpu(machine), self.gpu(machine)
        linger = slow("link")
        copy = machine.link.submit(lambda: (linger(), slot.copy_(source, non_blocking=True)))
        machine.gpu.submit(lambda: seen.copy_((slot * slot + 1).to(torch.float64).cumsum(0)), (copy,)).wait()
        assert seen.tolist() == [50 * row for row in range(1, 9)]

    def test_work_may_read_values_of_its_own(self, machine, slow):
        value, seen = self.gpu(machine), []
        linger = slow("gpu")
        machine.gpu.submit(lambda: (linger(), value.add_(4), seen.append(value.sum().item()))).wait()
        assert seen == [32]

    def test_a_lane_works_in_order(self, machine, slow):
        value = self.gpu(machine)
        for step in range(5):
            completion = machine.gpu.submit(lambda step=step: value.mul_(2).add_(step))
        completion.wait()
        assert value.tolist() == [26] * 8

    def test_cpu_work_waits_for_what_comes_over_and_the_gpu_for_the_cpu(self, machine, slow):
        value, sent, back = self.gpu(machine), self.host(machine, 0), self.gpu(machine)
        result, linger = self.host(machine, 0), slow("d2h")
        read = machine.readable(result)
        computed = machine.gpu.submit(lambda: value.add_(3))
        came = machine.d2h.submit(lambda: (linger(), sent.copy_(value, non_blocking=True)), (computed,))
        on_cpu = machine.cpu.submit(lambda: torch.mul(sent, 5, out=result), (came,))
        machine.gpu.submit(lambda: torch.add(read, 0, out=back), (on_cpu,)).wait()
        assert back.tolist() == [15] * 8

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
    def test_the_gpu_reads_host_memory_in_place(self, machine, slow, dtype):
        host = machine.host_tensor((4, 3), dtype)
        host.copy_(torch.arange(12).view(4, 3))
        view, seen = machine.readable(host[1:3]), machine.gpu_tensor((2, 3), dtype)
        assert (view.dtype, tuple(view.shape)) == (dtype, (2, 3))
        host[1].fill_(50)
        machine.gpu.submit(lambda: torch.add(view, 0, out=seen)).wait()
        assert seen.tolist() == [[50, 50, 50], [6, 7, 8]]

    def test_done_has_been_called_when_wait_returns(self, machine, slow):
        told, value = [], self.gpu(machine)
        completions = [machine.gpu.submit(lambda: value.add_(1), done=lambda i=i: told.append(i)) for i in range(5)]
        completions[-1].wait()
        assert told == [0, 1, 2, 3, 4]

    def test_done_is_called_by_polling_though_no_thread_waits(self, machine, slow):
        told, value, linger = threading.Event(), self.gpu(machine), slow("d2h")
        machine.d2h.submit(lambda: (linger(), value.add_(1)), done=told.set)
        assert machine.poll() == POLL_S
        while not told.is_set():
            machine.poll()
        assert machine.poll() == REST_S

    def test_work_that_needs_the_cpu_is_launched_before_the_cpu_has_ended(self, machine, slow):
        may_go_on, result, seen = threading.Event(), self.host(machine, 0), self.gpu(machine)
        read = machine.readable(result)
        seen.copy_(torch.add(read, 1)).mul_(2)  # kernels that CUDA loads while a stream waits may wait for that stream
        machine.settle()
        on_cpu = machine.cpu.submit(lambda: (may_go_on.wait(60), result.fill_(5)))
        summed = machine.gpu.submit(lambda: torch.add(read, 1, out=seen), (on_cpu,))
        behind = machine.gpu.submit(lambda: seen.mul_(2))
        assert not summed.has_ended()
        may_go_on.set()
        behind.wait()
        assert seen.tolist() == [12] * 8
        assert on_cpu.end_ns <= summed.start_ns

    def test_a_failure_of_the_cpu_lets_the_stream_go_on_and_fails_what_waits_for_it(self, machine, slow):
        may_go_on = threading.Event()
        on_cpu = machine.cpu.submit(lambda: (may_go_on.wait(60), self.failing_work()))
        summed = machine.gpu.submit(lambda: None, (on_cpu,))
        may_go_on.set()
        with pytest.raises(LaneError, match="no such expert"):
            summed.wait()
        machine.gpu.submit(lambda: None).wait()  # the stream is not stuck

    def test_a_failing_done_fails_the_wait(self, machine, slow):
        completion = machine.back.submit(lambda: None, done=lambda: 1 // 0)
        with pytest.raises(LaneError, match="division"):
            completion.wait()
        with pytest.raises(LaneError, match="division"):
            machine.settle()

    def test_times_follow_each_other(self, machine, slow):
        value, linger = self.gpu(machine), slow("gpu")
        completions = [machine.gpu.submit(lambda: (linger(), value.add_(1))) for _ in range(3)]
        late = machine.d2h.submit(lambda: value.clone(), (completions[-1],))
        machine.settle()
        for completion in (*completions, late):
            assert completion.ready_ns <= completion.start_ns <= completion.end_ns
        assert all(before.end_ns <= after.start_ns for before, after in pairwise((*completions, late)))
        assert late.ready_ns >= completions[-1].end_ns

    def test_settle_waits_for_all_lanes(self, machine, slow):
        value, told, linger = self.gpu(machine), [], slow("back")
        machine.back.submit(lambda: (linger(), value.add_(1)), done=lambda: told.append("back"))
        machine.cpu.submit(lambda: time.sleep(0.05), done=lambda: told.append("cpu"))
        machine.settle()
        assert sorted(told) == ["back", "cpu"]

    @pytest.mark.parametrize("lane", ["gpu", "cpu", "d2h", "back", "link"])
    def test_work_needs_no_gradients(self, machine, slow, lane):
        seen = []
        getattr(machine, lane).submit(lambda: seen.append(torch.is_inference_mode_enabled())).wait()
        assert seen == [True]

    def test_work_after_failed_work_fails_too(self, machine, slow):
        with pytest.raises(LaneError, match="the gpu lane has stopped: no such expert"):
            machine.gpu.submit(self.failing_work)
        with pytest.raises(LaneError, match="no such expert"):
            machine.gpu.submit(lambda: None)
        with pytest.raises(LaneError, match="no such expert"):
            machine.settle()

    def test_work_that_waits_for_failed_cpu_work_fails(self, machine, slow):
        with pytest.raises(LaneError, match="no such expert"):
            machine.gpu.submit(lambda: None, (machine.cpu.submit(self.failing_work),)).wait()

    @staticmethod
    def failing_work() -> None:
        raise ValueError("no such expert")

    @staticmethod
    def host(machine: CudaLanes, value: int) -> torch.Tensor:
        return machine.host_tensor((8,), torch.int32).fill_(value)

    @staticmethod
    def gpu(machine: CudaLanes) -> torch.Tensor:
        return machine.gpu_tensor((8,), torch.int32)


class TestOnAFake(LaneLaws):
    @pytest.fixture
    def machine(self, cuda: FakeCuda) -> Iterator[CudaLanes]:
        with fake_machine(cuda) as machine:
            yield machine

    @pytest.fixture
    def slow(self, cuda: FakeCuda) -> Slow:
        def slow(lane: str) -> Callable[[], object]:
            cuda.stream(lane).op_ns = SLOW_NS
            return lambda: None

        return slow

    def test_the_fake_tells_when_a_wait_is_forgotten(self, machine, slow, monkeypatch):
        monkeypatch.setattr(StreamCompletion, "hold_up", lambda self, stream: None)
        with pytest.raises(AssertionError, match=r"\[0, 0, 0"):
            self.test_work_waits_for_the_copy_that_it_needs(machine, slow)

    def test_the_fake_tells_when_a_flag_is_forgotten(self, machine, monkeypatch):
        monkeypatch.setattr(StreamFlag, "hold_up", lambda *_: None)
        may_go_on, result, seen = threading.Event(), self.host(machine, 0), self.gpu(machine)
        on_cpu = machine.cpu.submit(lambda: (may_go_on.wait(60), result.fill_(5)))
        machine.gpu.submit(lambda: torch.add(machine.readable(result), 1, out=seen), (on_cpu,))
        torch.cuda.synchronize(machine.device)  # which would wait for the flag
        may_go_on.set()
        assert seen.tolist() == [1] * 8


class TestOnTheSecondDevice(LaneLaws):
    """Lanes of GPU 1, which the host thread works on while the CPU's thread is that of GPU 0."""

    @pytest.fixture
    def machine(self, cuda: FakeCuda) -> Iterator[CudaLanes]:
        with fake_machine(cuda) as first:
            second = first.card(1)
            second.select()
            yield second

    @pytest.fixture
    def slow(self, cuda: FakeCuda) -> Slow:
        def slow(lane: str) -> Callable[[], object]:
            cuda.stream(f"{lane}1").op_ns = SLOW_NS
            return lambda: None

        return slow

    def test_it_has_streams_of_its_own_and_the_cpu_and_host_memory_of_the_first(self, cuda):
        with fake_machine(cuda, device_index=1) as first:
            second = first.card(1)
            assert (first.device.index, second.device.index) == (1, 0)
            assert first.card(1) is second
            assert torch.cuda.current_device() == 1
            assert second.cpu is first.cpu
            assert {stream.name for stream in cuda.streams} >= {"gpu", "d2h", "gpu1", "d2h1"}
        assert cuda.fraction == 1.0
        assert cuda.registered == {}


class TestWhereTheDriverKnowsNoFlags(LaneLaws):
    """The host waits in the stream's place."""

    @pytest.fixture(params=["no such function", "refused"])
    def machine(self, cuda: FakeCuda, request: pytest.FixtureRequest) -> Iterator[CudaLanes]:
        cuda.has_flags, cuda.flag_code = request.param == "refused", 801  # CUDA_ERROR_NOT_SUPPORTED
        with fake_machine(cuda) as machine:
            yield machine

    @pytest.fixture
    def slow(self) -> Slow:
        return lambda lane: lambda: None

    def test_work_that_needs_the_cpu_is_launched_before_the_cpu_has_ended(self, machine, slow):
        on_cpu = machine.cpu.submit(lambda: time.sleep(0.01))
        machine.gpu.submit(lambda: None, (on_cpu,))
        assert on_cpu.has_ended()
        assert machine.facts()["cpu_results_awaited_by"] == "the host"

    def test_a_failure_of_the_cpu_lets_the_stream_go_on_and_fails_what_waits_for_it(self, machine, slow):
        with pytest.raises(LaneError, match="no such expert"):
            machine.gpu.submit(lambda: None, (machine.cpu.submit(self.failing_work),))


@pytest.mark.device
class TestOnADevice(LaneLaws):
    @pytest.fixture
    def machine(self) -> Iterator[CudaLanes]:
        machine = CudaLanes(CudaSettings(cpu_threads=1))
        yield machine
        machine.close()

    @pytest.fixture
    def slow(self) -> Slow:
        return lambda lane: lambda: torch.cuda._sleep(20_000_000)

    def test_copies_in_chunks(self, machine):
        source = machine.host_tensor((9_000_001,), torch.uint8).random_()
        target = machine.gpu_tensor((10_000_000,), torch.uint8)
        machine.copy_in(target, source).wait()
        assert torch.equal(target[:9_000_001].cpu(), source)

    def test_more_than_the_limit_is_refused(self):
        machine = CudaLanes(CudaSettings(cpu_threads=1, memory_bytes=GB))
        with pytest.raises(RefusedError, match=r"of a limit of 1\.00 GB"):
            machine.gpu_tensor((2 * GB,), torch.uint8)
        machine.close()

    def test_facts(self, machine):
        assert machine.facts()["gpu"] == torch.cuda.get_device_name()


# --- Memory that a CUDA machine may allocate and read in place, and settings that it refuses before a run -------------


class TestMemory:
    def test_is_limited_while_the_machine_lives(self, cuda):
        with fake_machine(cuda, memory_bytes=24 * GB):
            assert cuda.fraction == 0.24
        assert cuda.fraction == 1.0

    def test_running_out_of_it_in_work_is_told_with_numbers(self, cuda):
        def work() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

        with fake_machine(cuda, memory_bytes=24 * GB) as machine, pytest.raises(LaneError) as raised:
            machine.gpu.submit(work)
        assert str(raised.value) == (
            "the gpu lane has stopped: out of GPU memory: 3.00 GB in use and 4.00 GB held of a limit of 24.00 GB, "
            "80.00 GB of 100.00 GB free on the device; choose fewer slots, a smaller batch or a shorter context"
        )

    def test_a_tensor_that_does_not_fit_is_refused(self, cuda, monkeypatch):
        def full(*args: object, **kwargs: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with fake_machine(cuda) as machine:
            monkeypatch.setattr(torch, "zeros", full)
            with pytest.raises(RefusedError, match=r"expected room for 4\.00 GB, got 3\.00 GB in use"):
                machine.gpu_tensor((GB,), torch.float32)

    def test_memory_that_cuda_does_not_know_cannot_be_read(self, cuda):
        with fake_machine(cuda) as machine, pytest.raises(RuntimeError, match="not registered"):
            machine.readable(torch.zeros(4))

    def test_a_view_needs_contiguous_memory(self, cuda):
        with fake_machine(cuda) as machine, pytest.raises(ValueError, match="contiguous"):
            machine.readable(machine.host_tensor((4, 4), torch.float32).t())

    def test_a_gpu_reads_results_in_place_where_it_can(self, cuda):
        with fake_machine(cuda) as machine:
            assert (machine.result_path, machine.settings.result_path) == ("direct", "direct")
            assert not [remark for remark in machine.remarks() if "pinned" in remark]

    def test_from_a_gpu_that_sees_old_values_results_go_over_the_link(self, cuda):
        cuda.maps_pinned_memory = False
        self.falls_back(cuda, "it read something else")

    def test_so_they_do_if_it_looks_only_once(self, cuda):
        cuda.cached = {}
        self.falls_back(cuda, "it read something else")

    def test_and_if_it_cannot_see_them_at_all(self, cuda, monkeypatch):
        monkeypatch.setattr(cuda, "cudaHostRegister", lambda address, size, flags: 0)
        monkeypatch.setattr(cuda, "cudaHostUnregister", lambda address: 0)
        self.falls_back(cuda, "not registered")

    @staticmethod
    def falls_back(cuda: FakeCuda, why: str) -> None:
        with fake_machine(cuda) as machine:
            assert (machine.result_path, machine.settings.result_path) == ("h2d", "h2d")  # and so in a profile's facts
            [remark] = [each for each in machine.remarks() if "pinned" in each]
            assert remark.startswith("the GPU does not read what the CPU writes to pinned memory, so the CPU's results")
            assert "(result path h2d): " in remark
            assert why in remark
        asked = pytest.raises(RefusedError, match=f": .*{why}.*; choose --result-path h2d, or leave it out")
        with asked, fake_machine(cuda, result_path="direct"):
            pass

    def test_results_over_the_link_need_no_views(self, cuda):
        cuda.maps_pinned_memory = False
        with fake_machine(cuda, result_path="h2d") as machine:
            assert machine.result_path == "h2d"


class TestSettingsAreRefused:
    @pytest.mark.parametrize(("given", "why"), [
        ({"device_index": 2}, "expected a device from 0 to 1, got 2"),
        ({"memory_bytes": 90 * GB}, "at most the 80.00 GB that are free of 100.00 GB, got 90.00 GB; choose less"),
        ({"memory_bytes": 0}, "got 0"),
        ({"cpu_threads": 0}, "cpu_threads >= 1"),
        ({"chunk_bytes": -1}, "chunk_bytes >= 0"),
        ({"result_path": "pigeon"}, "got .* and pigeon"),
        ({"cpu_cores": (4000,)}, r"got \[4000\]"),
        ({"cpu_cores": ()}, "got none"),
        ({"copy_core": 4000}, r"got \[4000\]"),
        ({"host_core": 4000}, r"got \[4000\]"),
    ])
    def test_what_the_computer_does_not_have(self, cuda, monkeypatch, given, why):
        install(monkeypatch, cuda)
        with pytest.raises(RefusedError, match=why):
            CudaSettings(**given).check()

    def test_no_gpu(self, cuda, monkeypatch):
        cuda.devices = 0
        install(monkeypatch, cuda)
        with pytest.raises(RefusedError, match="finds none; install a CUDA build of torch and a driver, or use host"):
            CudaLanes()
