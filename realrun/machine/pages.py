"""Large blocks of memory: in huge pages if the system has them, with all pages mapped at once.

The CPU reads experts faster from huge pages, and CUDA locks them faster: there are 512 times fewer than pages of 4 KiB.
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from realrun.errors import RefusedError
from realrun.machine.cores import usable_cores
from realrun.machine.host_memory import gb

HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of arm64 with 4-KiB pages: https://docs.kernel.org/admin-guide/mm/transhuge.html
LEAST_BYTES = 2 * HUGE_PAGE_BYTES  # size of a large block
PIECE_BYTES = 64 << 20  # touched by one thread at a time
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Pages(mmap.mmap):
    """Zeros, which tensors on them keep alive; from LEAST_BYTES on in huge pages, touched by all cores.

    ``address``: of the first byte, a multiple of HUGE_PAGE_BYTES in a large block, otherwise of the page size. Raises
    RefusedError if the system has no memory left.
    """

    def __new__(cls, size_bytes: int) -> Self:
        """Map enough to align a large block, and for the whole of its last huge page."""
        large = size_bytes >= LEAST_BYTES
        mapped_bytes = (-(-size_bytes // HUGE_PAGE_BYTES) + 1) * HUGE_PAGE_BYTES if large else size_bytes
        try:
            return super().__new__(cls, -1, mapped_bytes, **PRIVATE)
        except (OSError, OverflowError) as error:
            raise RefusedError(
                f"expected room for {gb(size_bytes)} of host memory, the system gave none ({error}); close other "
                "programs, or choose a smaller model, fewer layers or a smaller type"
            ) from error

    def __init__(self, size_bytes: int) -> None:
        mapped = np.frombuffer(self, np.uint8)
        large = size_bytes >= LEAST_BYTES
        self._offset = -mapped.ctypes.data % HUGE_PAGE_BYTES if large else 0
        self._size_bytes, self.address = size_bytes, mapped.ctypes.data + self._offset
        if large:
            with suppress(OSError, AttributeError):  # a kernel without huge pages, or not Linux
                self.madvise(mmap.MADV_HUGEPAGE)
            touch(mapped[self._offset : self._offset + size_bytes])

    def tensor(self) -> Tensor:
        """uint8 [size_bytes]."""
        return torch.frombuffer(self, dtype=torch.uint8, count=self._size_bytes, offset=self._offset)


def touch(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Zero the first byte of each page of ``memory``, with one thread per core: numpy releases the interpreter lock."""
    pieces = [memory[begin : begin + PIECE_BYTES] for begin in range(0, len(memory), PIECE_BYTES)]

    def touch_piece(piece: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        piece[:: mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(min(len(pieces), len(usable_cores()))) as pool:
        list(pool.map(touch_piece, pieces))
