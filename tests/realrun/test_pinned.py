"""Host memory: page-locked at its exact size, given back when nobody uses it, refused where there is none."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from realrun.errors import RealRunError, RefusedError  # noqa: E402
from realrun.machine.pinned import Pinned, available_host_bytes, check_host_memory, plain  # noqa: E402


class FakeCudart:
    """CUDA's runtime with room for some bytes: notes what is locked where."""

    def __init__(self, room_bytes: int = 1 << 20) -> None:
        self.room_bytes = room_bytes
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        if sum(self.locked.values()) + size_bytes > self.room_bytes:
            return 2
        self.locked[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self.locked.pop(address, None) else 713


def test_pinned_memory_has_the_exact_size_and_is_aligned_to_pages() -> None:
    cudart = FakeCudart()
    memory = Pinned(cudart)(5000)
    assert (memory.shape, memory.dtype) == ((5000,), torch.uint8)
    assert cudart.locked == {memory.data_ptr(): 5000}
    assert memory.data_ptr() % 4096 == 0
    memory.fill_(7)
    assert memory.sum() == 35000


def test_memory_stays_locked_as_long_as_a_view_of_it_is_used() -> None:
    cudart = FakeCudart()
    allocate = Pinned(cudart)
    view = allocate(4096).view(2, -1)[1].view(torch.float32)
    gc.collect()
    assert allocate.pinned_bytes == 4096 == sum(cudart.locked.values())
    view.fill_(1.0)
    del view
    gc.collect()
    assert cudart.locked == {}
    assert allocate.pinned_bytes == 0


def test_where_no_more_can_be_locked_the_refusal_says_how_much_is() -> None:
    allocate = Pinned(FakeCudart(room_bytes=100_000_000))
    held = allocate(60_000_000)
    with pytest.raises(RefusedError, match=r"asked for 0\.05 GB with 0\.06 GB locked already.*error 2.*ulimit -l"):
        allocate(50_000_000)
    del held
    gc.collect()
    assert len(allocate(50_000_000)) == 50_000_000


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RefusedError, match="expected a GPU that torch can use"):
        Pinned()


def test_memory_that_cuda_does_not_unlock_is_an_error() -> None:
    with pytest.raises(RealRunError, match="expected 0, got error 713"):
        Pinned(FakeCudart()).unlock(0x1000, 4096)


def test_plain_memory_is_aligned() -> None:
    assert all(plain(size).data_ptr() % 64 == 0 for size in (64, 192, 5 * 64))


def test_free_memory_is_what_linux_calls_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       8000 kB\nMemFree:        1000 kB\nMemAvailable:   3000 kB\n")
    assert available_host_bytes(meminfo) == 3000 * 1024
    assert available_host_bytes(tmp_path / "none") > 0


def test_experts_that_do_not_fit_are_refused_saying_by_how_much() -> None:
    check_host_memory(3_000_000_000, available_bytes=3_000_000_000)
    with pytest.raises(RefusedError, match=r"need 5\.50 GB of host memory, 3\.00 GB are free: 2\.50 GB short"):
        check_host_memory(5_500_000_000, available_bytes=3_000_000_000)
