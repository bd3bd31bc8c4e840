"""Host memory for experts: ordinary, or page-locked so that a GPU copies from it at full speed; and whether it fits.

torch's own page-locked allocator rounds each block up to a power of two (pytorch issue 95823), which may double the
memory that experts take. Here ordinary pages are registered with CUDA instead, which takes their exact size.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realrun.errors import RealRunError, RefusedError

MEMINFO = Path("/proc/meminfo")
PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped: kernels may read it in place
UNLOADING = 4  # cudaErrorCudartUnloading: the process ends, and with it all locks
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def plain(size_bytes: int) -> Tensor:
    """Ordinary memory: uint8 [size_bytes], 64-byte aligned as all that torch allocates."""
    return torch.empty(size_bytes, dtype=torch.uint8)


class Pinned:
    """Allocates page-locked memory of exact size; a block is unlocked when no tensor uses it any more.

    ``cudart``: what registers memory; by default CUDA's runtime library, as torch gives it. Raises RefusedError where
    there is none.
    """

    def __init__(self, cudart: Any = None) -> None:
        if cudart is None and not torch.cuda.is_available():
            raise RefusedError(
                "page-locked memory: expected a GPU that torch can use, found none; take ordinary memory"
            )
        self._cudart = torch.cuda.cudart() if cudart is None else cudart  # type: ignore[no-untyped-call]
        self.pinned_bytes = 0

    def __call__(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes], page-aligned. Raises RefusedError where the system locks no more memory."""
        pages = _Pages(-1, size_bytes, **PRIVATE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        code = int(self._cudart.cudaHostRegister(memory.data_ptr(), size_bytes, PORTABLE_AND_MAPPED))
        if code != 0:
            raise RefusedError(self._no_more(size_bytes, code))
        pages.locked_by, pages.address = self, memory.data_ptr()
        self.pinned_bytes += size_bytes
        return memory

    def unlock(self, address: int, size_bytes: int) -> None:
        """Raises RealRunError where CUDA refuses."""
        code = int(self._cudart.cudaHostUnregister(address))
        if code not in (0, UNLOADING):
            raise RealRunError(f"cudaHostUnregister of {gb(size_bytes)} at {address:#x}: expected 0, got error {code}")
        self.pinned_bytes -= size_bytes

    def _no_more(self, size_bytes: int, code: int) -> str:
        return (
            f"no page-locked memory left: asked for {gb(size_bytes)} with {gb(self.pinned_bytes)} locked already, "
            f"cudaHostRegister gave error {code}. Free memory of other programs, raise the limit (`ulimit -l`; in a "
            "container its memory limit; Windows and WSL lock about half of the machine's memory at most), take a "
            "smaller model or type, or run with ordinary memory: copies are slower then"
        )


class _Pages(mmap.mmap):
    """Anonymous pages that the tensors on them keep alive."""

    locked_by: Pinned | None = None
    address = 0

    def __del__(self) -> None:
        if self.locked_by is not None:
            self.locked_by.unlock(self.address, len(self))


def available_host_bytes(meminfo: Path = MEMINFO) -> int:
    """Memory that programs may still take without swapping; without Linux's figure: free pages."""
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_host_memory(needed_bytes: int, available_bytes: int | None = None) -> None:
    """Raises RefusedError, saying by how much, where the machine's free memory does not hold ``needed_bytes``."""
    available = available_host_bytes() if available_bytes is None else available_bytes
    short = needed_bytes - available
    if short > 0:
        raise RefusedError(
            f"experts need {gb(needed_bytes)} of host memory, {gb(available)} are free: {gb(short)} short. "
            "Close other programs, or take a smaller model, fewer layers or a smaller type"
        )


def gb(size_bytes: float) -> str:
    """For messages."""
    return f"{size_bytes / 1e9:.2f} GB"
