"""Host memory: page-locked at its exact size, given back when nobody uses it, refused where there is none."""

from __future__ import annotations

import gc

import pytest
import torch

from realrun.errors import RefusedError
from realrun.machine.pinned import HUGE_PAGE_BYTES, LEAST_BYTES, Pinned, plain


class FakeCudart:
    """CUDA's runtime with room for some bytes: notes what is locked where.

    As in CUDA's, a call that fails leaves its code in ``last_error`` until somebody reads it.
    """

    def __init__(self, room_bytes: int = 1 << 20) -> None:
        self.room_bytes = room_bytes
        self.locked: dict[int, int] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        if sum(self.locked.values()) + size_bytes > self.room_bytes:
            self.last_error = 2
            return 2
        self.locked[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if self.locked.pop(address, None) is None:
            self.last_error = 713
            return 713
        return 0

    def launch(self) -> None:
        """As torch does: an error that is there, of any call before, is read and raised."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


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
    cudart = FakeCudart(room_bytes=100_000_000)
    allocate = Pinned(cudart, cudart.launch)
    held = allocate(60_000_000)
    with pytest.raises(RefusedError, match=r"of 0\.05 GB, with 0\.06 GB locked already.*error 2.*ulimit -l"):
        allocate(50_000_000)
    del held
    gc.collect()
    assert len(allocate(50_000_000)) == 50_000_000


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RefusedError, match="expected a GPU that torch can use"):
        Pinned()


def test_memory_that_cuda_does_not_unlock_is_an_error() -> None:
    cudart = FakeCudart()
    with pytest.raises(RuntimeError, match="expected 0, got error 713"):
        Pinned(cudart, cudart.launch).unlock(0x1000, 4096)


def test_a_caller_that_goes_on_meets_no_error_of_a_failed_call() -> None:
    cudart = FakeCudart(room_bytes=1000)
    allocate = Pinned(cudart, cudart.launch)
    with pytest.raises(RefusedError):
        allocate(2000)
    cudart.launch()
    with pytest.raises(RuntimeError):
        allocate.unlock(0x1000, 4096)
    cudart.launch()


def test_large_memory_lies_in_huge_pages_and_is_locked_where_it_begins() -> None:
    cudart = FakeCudart(1 << 30)
    memory = Pinned(cudart)(LEAST_BYTES + 1000)
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert cudart.locked == {memory.data_ptr(): LEAST_BYTES + 1000}
    del memory
    gc.collect()
    assert cudart.locked == {}


def test_it_is_known_how_fast_memory_was_locked() -> None:
    now = iter((1_000_000_000, 3_000_000_000, 3_000_000_000, 4_000_000_000))
    allocate = Pinned(FakeCudart(1 << 30), clock_ns=lambda: next(now))
    assert allocate.remarks() == ()
    held = allocate(20_000_000)
    del held  # what is given back has taken its time nevertheless
    gc.collect()
    allocate(40_000_000)
    assert allocate.remarks() == ("page-locked 0.06 GB of host memory in 3.0 s, 0.02 GB/s",)


@pytest.mark.parametrize("size", [64, 192, 5 * 64, LEAST_BYTES, LEAST_BYTES + 64])
def test_plain_memory_is_aligned_and_zero(size: int) -> None:
    memory = plain(size)
    assert memory.shape == (size,)
    assert memory.data_ptr() % (HUGE_PAGE_BYTES if size >= LEAST_BYTES else 64) == 0
    assert not memory.any()
