"""Experts in a file on a disk, and those of them that the host's memory holds.

Reads go past the page cache: with O_DIRECT where the file system allows it, else the pages are dropped before and after
each read (posix_fadvise). So on a disk a read always takes its time, and what memory holds is the session's decision.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from mmap import mmap
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory

from torch import Tensor

from policies.mechanism.host_tier import Read
from policies.mechanism.views import ExpertId
from realrun.errors import RefusedError
from realrun.experts.store import Allocate, ExpertLayout, Slab

BLOCK_BYTES = 4096  # of which O_DIRECT wants offsets, sizes and addresses to be multiples, on every common disk
DEPTH = 8  # requests at once, as the simulated reads of ``sim.machine.disks.DIRECT_DEPTH``


def in_blocks(size_bytes: int) -> int:
    """The size in whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def aligned(size_bytes: int, allocate: Allocate) -> Tensor:
    """Memory uint8 [size_bytes] from ``allocate`` whose address is a multiple of a block."""
    memory = allocate(size_bytes + BLOCK_BYTES)
    skipped = -memory.data_ptr() % BLOCK_BYTES
    return memory[skipped : skipped + size_bytes]


class ExpertFile:
    """An open file of experts, each in whole blocks, read in requests of ``request_bytes``, ``depth`` at once.

    ``direct``: whether reads are direct. ``reads`` and ``bytes_read`` count experts and bytes that came from the disk.
    """

    def __init__(
        self, path: Path, layouts: Sequence[ExpertLayout], experts: int, request_bytes: int | None = None,
        depth: int | None = None,
    ) -> None:
        self.layouts, self.experts, self.depth = tuple(layouts), experts, depth or DEPTH
        self.stride = in_blocks(max(layout.size_bytes for layout in layouts))
        self.request_bytes = in_blocks(request_bytes or -(-self.stride // self.depth))
        self.reads = self.bytes_read = 0
        self._descriptor, self.direct = _opened(path)
        self._readers = ThreadPoolExecutor(self.depth, "disk")

    def read(self, expert_id: ExpertId, target: Tensor, request_bytes: int | None = None) -> None:
        """Read an expert, or its first whole blocks, to ``target`` uint8 [up to stride], at a block's address.
        ``request_bytes``: other requests than the file's. Raises OSError."""
        begin, memory = (expert_id.layer * self.experts + expert_id.expert) * self.stride, target.numpy().data
        step = request_bytes or self.request_bytes
        self._forget(begin)
        for done in [self._readers.submit(self._fill, memory[at : at + step], begin + at)
                     for at in range(0, len(memory), step)]:
            done.result()
        self._forget(begin)
        self.reads, self.bytes_read = self.reads + 1, self.bytes_read + len(memory)

    def close(self) -> None:
        """Close the file; its readers end."""
        self._readers.shutdown()
        os.close(self._descriptor)

    def _fill(self, memory: memoryview, offset: int) -> None:
        while memory:
            count = os.preadv(self._descriptor, [memory], offset)
            if not count:
                raise OSError(f"file of experts: expected {len(memory)} bytes at {offset}, it ends there")
            memory, offset = memory[count:], offset + count

    def _forget(self, begin: int) -> None:
        """Drop the expert's pages from the page cache, unless reads pass it."""
        if not self.direct:
            os.posix_fadvise(self._descriptor, begin, self.stride, os.POSIX_FADV_DONTNEED)


def _opened(path: Path) -> tuple[int, bool]:
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "preadv"):
        raise RefusedError("experts on a disk: expected a system with preadv and posix_fadvise, such as Linux")
    with suppress(OSError):  # where direct reads are not possible, or not of blocks
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(descriptor, [mmap(-1, BLOCK_BYTES)], 0)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor, True
    return os.open(path, os.O_RDONLY), False


@contextmanager
def written(
    slabs: Iterable[Slab], count: int, folder: Path, request_bytes: int | None = None, depth: int | None = None
) -> Iterator[ExpertFile]:
    """A file in ``folder`` of the experts of ``count`` layers, one layer at a time; it is deleted at the end.

    Raises RefusedError if the folder's disk has too little room, or fails, and for layers whose experts differ in size.
    """
    with TemporaryDirectory(prefix="trilane-experts-", dir=folder) as inside:
        path = Path(inside) / "experts"
        try:
            layouts, experts = _write(path, slabs, count)
        except OSError as error:
            raise RefusedError(
                f"{folder}: expected to write a file of experts, got: {error}; name a folder on another disk"
            ) from error
        made = ExpertFile(path, layouts, experts, request_bytes, depth)
        path.unlink()  # it takes room until it is closed, even if the process is killed
        try:
            yield made
        finally:
            made.close()


def _write(path: Path, slabs: Iterable[Slab], count: int) -> tuple[Sequence[ExpertLayout], int]:
    """Write experts, each in whole blocks; the layouts of all layers, and the experts of one."""
    layouts, experts = list[ExpertLayout](), 0
    with path.open("wb") as file:
        for slab in slabs:
            layouts.append(slab.layout)
            _check_alike(layouts)
            experts, stride = len(slab.memory), in_blocks(slab.layout.size_bytes)
            if len(layouts) == 1:
                _check_room(path.parent.parent, count * experts * stride)
            padding = bytes(stride - slab.layout.size_bytes)
            for expert in slab.memory:
                file.write(expert.numpy().data)
                file.write(padding)
        file.flush()
        os.fsync(file.fileno())  # dirty pages cannot be dropped
    return layouts, experts


def _check_alike(layouts: Sequence[ExpertLayout]) -> None:
    first, last = layouts[0].size_bytes, layouts[-1].size_bytes
    if last != first:
        raise RefusedError(
            f"experts on a disk: expected experts of one size in all layers, {first} bytes, got {last} in layer "
            f"{len(layouts) - 1}; choose weights of one format"
        )


def _check_room(folder: Path, size_bytes: int) -> None:
    free_bytes = disk_usage(folder).free
    if size_bytes > free_bytes:
        raise RefusedError(
            f"{folder}: expected room for {size_bytes / 1e9:.1f} GB of experts, {free_bytes / 1e9:.1f} GB are free; "
            "name a folder on another disk"
        )


class HeldExperts:
    """Buffers in the host's memory for ``capacity_bytes`` of experts of ``expert_bytes``, read from a file."""

    def __init__(self, file: ExpertFile, capacity_bytes: int, expert_bytes: int, allocate: Allocate) -> None:
        slots, stride = capacity_bytes // expert_bytes, file.stride
        self.layouts, self._file = file.layouts, file
        self._free: list[Tensor] = list(aligned((slots + 1) * stride, allocate).view(slots + 1, stride))
        self._spare = self._free.pop()  # through which experts go to the GPU before the run
        self._buffers: dict[ExpertId, Tensor] = {}

    def buffer(self, layer: int, expert: int) -> Tensor:
        """One held expert's weights: uint8 [layouts[layer].size_bytes]."""
        return self._buffers[ExpertId(layer, expert)][: self.layouts[layer].size_bytes]

    def place(self, expert_id: ExpertId, target: Tensor) -> None:
        """Copy an expert to the GPU before the run."""
        self._file.read(expert_id, self._spare)
        target.copy_(self._spare[: len(target)])

    def fill(self, held: Collection[ExpertId]) -> None:
        """Hold these experts before the run."""
        for expert_id in sorted(held):
            self._file.read(expert_id, self._take(expert_id))

    def begin(self, read: Read) -> Tensor:
        """Free the buffers of a read's victims, and return the buffer that it goes to."""
        for victim in read.victims:
            self._free.append(self._buffers.pop(victim))
        return self._take(read.key)

    def read(self, read: Read, target: Tensor) -> None:
        """Read an expert to its buffer."""
        self._file.read(read.key, target)

    def _take(self, expert_id: ExpertId) -> Tensor:
        buffer = self._buffers[expert_id] = self._free.pop()
        return buffer
