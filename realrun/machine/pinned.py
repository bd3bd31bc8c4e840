"""Host memory for experts: ordinary, or page-locked so that a GPU copies from it at full speed.

Large blocks are in huge pages if the system has them, with all pages mapped at once: the CPU reads experts faster from
huge pages, and CUDA locks them faster, since there are 512 times fewer than pages of 4 KiB.

torch's own allocator of page-locked memory rounds each block up to a power of two (pytorch issue 95823), which may
double the memory of experts. Here ordinary pages are registered with CUDA instead, at their exact size.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from realrun.errors import RefusedError
from realrun.machine.cores import usable_cores
from trilane.common.units import gb

HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of arm64 with 4-KiB pages: https://docs.kernel.org/admin-guide/mm/transhuge.html
LEAST_BYTES = 2 * HUGE_PAGE_BYTES  # size of a large block
PIECE_BYTES = 64 << 20  # touched by one thread at a time
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped: kernels can read it in place
UNLOADING = 4  # cudaErrorCudartUnloading: the process is ending, and all locks with it


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


def plain(size_bytes: int) -> Tensor:
    """Ordinary memory: zeros, uint8 [size_bytes], 64-byte aligned like all tensors; large blocks are ``Pages``.

    Raises RefusedError if the system has no memory left.
    """
    return Pages(size_bytes).tensor() if size_bytes >= LEAST_BYTES else torch.zeros(size_bytes, dtype=torch.uint8)


def launch_on_gpu() -> None:
    """Launch a small kernel. Raises RuntimeError for an error left by an earlier call, which is thereby cleared."""
    torch.ones(1, device="cuda")


class Pinned:
    """Allocates page-locked memory of exact size; a block is unlocked when no tensor uses it any more.

    ``cudart``: registers memory; by default CUDA's runtime library, as bound by torch. ``launch``: a kernel, see
    ``launch_on_gpu``. Raises RefusedError if there is no GPU.
    """

    def __init__(
        self,
        cudart: Any = None,
        launch: Callable[[], None] = launch_on_gpu,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if cudart is None and not torch.cuda.is_available():
            raise RefusedError(
                "page-locked memory: expected a GPU that torch can use, found none; take ordinary memory"
            )
        self._cudart = torch.cuda.cudart() if cudart is None else cudart  # type: ignore[no-untyped-call]
        self._launch, self._clock_ns = launch, clock_ns
        self.pinned_bytes = 0
        self._bytes_so_far, self._ns_so_far = 0, 0  # in all, including memory that has been unlocked

    def __call__(self, size_bytes: int) -> Tensor:
        """Zeros, uint8 [size_bytes], aligned as ``Pages`` are. Raises RefusedError where the system locks no more."""
        begin_ns = self._clock_ns()
        pages = _LockedPages(size_bytes)
        code = int(self._cudart.cudaHostRegister(pages.address, size_bytes, PORTABLE_AND_MAPPED))
        if code != 0:
            self._clear_last_error()
            raise RefusedError(self._no_more(size_bytes, code))
        pages.locked_by, pages.locked_bytes = self, size_bytes
        self.pinned_bytes += size_bytes
        self._bytes_so_far += size_bytes
        self._ns_so_far += self._clock_ns() - begin_ns
        return pages.tensor()

    def unlock(self, address: int, size_bytes: int) -> None:
        """Unlock a block. Raises RuntimeError if CUDA refuses."""
        code = int(self._cudart.cudaHostUnregister(address))
        if code not in (0, UNLOADING):
            self._clear_last_error()
            raise RuntimeError(f"cudaHostUnregister of {gb(size_bytes)} at {address:#x}: expected 0, got error {code}")
        self.pinned_bytes -= size_bytes

    def remarks(self) -> tuple[str, ...]:
        """The time of allocating and locking in all; nothing if hardly any memory was locked."""
        if self._bytes_so_far < LEAST_BYTES:
            return ()
        taken, seconds = self._bytes_so_far, max(1, self._ns_so_far) / 1e9
        return (f"page-locked {gb(taken)} of host memory in {seconds:.1f} s, {gb(taken / seconds)}/s",)

    def _clear_last_error(self) -> None:
        """Clear the error of a failed call, which CUDA's runtime would report at the thread's next check.

        torch's binding of the runtime has no cudaGetLastError, which clears it, but torch calls it after each launch.
        """
        with suppress(RuntimeError):
            self._launch()

    def _no_more(self, size_bytes: int, code: int) -> str:
        return (
            f"no page-locked memory left: cudaHostRegister of {gb(size_bytes)}, with {gb(self.pinned_bytes)} locked "
            f"already, gave error {code}. Close programs, raise the limit (`ulimit -l`; in a container its memory "
            "limit; Windows and WSL lock at most about half of the machine's memory), choose a smaller model or type, "
            "or run with ordinary memory, from which copies are slower"
        )


class _LockedPages(Pages):
    """Unlocked before they are given back."""

    locked_by: Pinned | None = None
    locked_bytes = 0

    def __del__(self) -> None:
        if self.locked_by is not None:
            self.locked_by.unlock(self.address, self.locked_bytes)
