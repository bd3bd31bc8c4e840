"""Large blocks of memory: aligned to huge pages, huge pages asked for, all pages touched by several threads."""

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
from realrun.machine.pinned import HUGE_PAGE_BYTES, LEAST_BYTES, PIECE_BYTES, Pages, touch

LARGE = LEAST_BYTES + 5000


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What ``madvise`` was called with."""
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
    """Of the mapping that ``address`` is in."""
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
