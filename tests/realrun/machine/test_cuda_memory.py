"""Memory that a CUDA machine may allocate and read in place, and settings that it refuses before a run."""

from __future__ import annotations

import pytest
import torch

from realrun.errors import LaneError, RefusedError
from realrun.machine.cuda_lanes import CudaLanes, CudaSettings
from tests.kit.fake_cuda import GB, FakeCuda
from tests.kit.fake_torch import fake_machine, install


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
