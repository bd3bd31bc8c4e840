"""Host memory: large blocks in huge pages, touched by several threads; page-locked memory of exact size."""

from __future__ import annotations

import gc
import mmap
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from realrun.errors import RefusedError
from realrun.machine import pinned as pages
from realrun.machine.pinned import HUGE_PAGE_BYTES, LEAST_BYTES, PIECE_BYTES, Pages, Pinned, plain, touch

LARGE = LEAST_BYTES + 5000


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Arguments of the calls of ``madvise``."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(Pages, "madvise", lambda self, *given: calls.append(given), raising=False)
    return calls


def test_for_a_large_block_huge_pages_are_asked(advised: list[tuple[int, ...]]) -> None:
    memory = Pages(LARGE).tensor()
    assert (memory.shape, memory.dtype) == ((LARGE,), torch.uint8)
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert advised == [(14,)]  # on all of it
    assert not memory.any()
    memory.fill_(7)


def test_a_large_block_is_aligned_and_its_last_huge_page_is_whole(
    advised: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An odd size of page, at which no system begins by chance: recent kernels align to 2 MiB by themselves."""
    page_bytes = 61 << 20
    monkeypatch.setattr(pages, "HUGE_PAGE_BYTES", page_bytes)
    for block in [Pages(LARGE) for _ in range(4)]:
        assert block.tensor().data_ptr() == block.address
        assert block.address % page_bytes == 0
        end_of_mapping = torch.frombuffer(block, dtype=torch.uint8).data_ptr() + len(block)
        assert block.address + page_bytes <= end_of_mapping


def test_a_small_block_is_as_large_as_it_was_asked_for(advised: list[tuple[int, ...]]) -> None:
    block = Pages(LEAST_BYTES - 1)
    assert len(block) == LEAST_BYTES - 1 == len(block.tensor())
    assert advised == []


def test_where_there_are_no_huge_pages_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Pages, advice: int) -> None:
        raise OSError(22, "Invalid argument")  # a kernel without them

    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(Pages, "madvise", refuse, raising=False)
    assert not Pages(LARGE).tensor().any()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")  # macOS, Windows
    monkeypatch.setattr(Pages, "madvise", None)
    assert not Pages(LARGE).tensor().any()


def test_every_page_is_touched_once_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "usable_cores", lambda: {0, 1, 2})
    together = threading.Barrier(3, timeout=60)  # none goes on before three have begun

    class Noting(np.ndarray):  # type: ignore[type-arg]
        def __setitem__(self, key: object, value: object) -> None:
            together.wait()
            super().__setitem__(key, value)  # type: ignore[index]

    memory = np.ones(2 * PIECE_BYTES + 3 * mmap.PAGESIZE + 1, np.uint8)
    touch(memory.view(Noting))
    assert (memory[:: mmap.PAGESIZE] == 0).all()
    assert memory.sum() == len(memory) - len(memory[:: mmap.PAGESIZE])


SMAPS = Path("/proc/self/smaps")  # proc_pid_smaps(5)


def resident_bytes(address: int) -> int:
    """Resident bytes of the mapping that ``address`` is in."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        word, *others = line.split()
        if "-" in word:
            begin, end = (int(text, 16) for text in word.split("-"))
            inside = begin <= address < end
        elif inside and word == "Rss:":
            return int(others[0]) << 10
    raise AssertionError(f"{address:#x} is in no mapping")


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not say what is resident")
def test_all_pages_are_there_before_anything_is_written() -> None:
    size = 64 << 20
    untouched = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    assert resident_bytes(untouched.ctypes.data) == 0
    block = Pages(size)
    assert resident_bytes(block.address) >= size


def test_a_block_lives_as_long_as_a_tensor_on_it() -> None:
    block = Pages(LARGE)
    gone = weakref.ref(block)
    view = block.tensor().view(2, -1)[1]
    del block
    gc.collect()
    assert gone() is not None
    view.fill_(1)
    del view
    gc.collect()
    assert gone() is None


def test_more_than_the_system_has_addresses_for_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"expected room for .* GB of host memory"):
        Pages(sys.maxsize // 2)


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
