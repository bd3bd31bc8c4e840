"""The file of experts of a run whose host has room for a part of them, and the memory of the host for that part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from realrun.errors import RefusedError
from realrun.experts.expert_file import ExpertFile, HeldExperts, written
from realrun.experts.store import Allocate, Slab
from sim.runs.host_memory import host_bytes_of
from sim.runs.prepare import Prepared


def host_bytes_of_run(prepared: Prepared) -> int | None:
    """Bytes of the host's memory for experts; None where it has room for all."""
    return host_bytes_of(prepared.scenario, prepared.shape)


@contextmanager
def file_for(folder: Path | None, prepared: Prepared, slabs: Iterable[Slab]) -> Iterator[ExpertFile | None]:
    """A file of a run's experts in ``folder`` for the block, where its host holds a part of them; else None.

    It is read in the requests that the machine's disk states. Raises RefusedError without a folder on a disk, and for a
    folder that is of no use.
    """
    if host_bytes_of_run(prepared) is None:
        if folder is not None:
            raise RefusedError(
                f"--experts-in {folder}: expected host_expert_gb below the size of all experts "
                "(`--set host_expert_gb=8`), or no folder"
            )
        yield None
        return
    if folder is None or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise RefusedError(
            f"host_expert_gb {prepared.scenario.host_expert_gb}: expected a folder on the disk that can be "
            f"written to, for a file of the experts (`--experts-in DIR`), got {folder}"
        )
    if _in_memory(folder):
        raise RefusedError(
            f"--experts-in {folder}: expected a folder on a disk, this one is in memory (tmpfs), from which reads say "
            "nothing about a disk"
        )
    drive = prepared.hardware.disk
    assert drive is not None
    with written(slabs, prepared.shape.moe_layers, folder, drive.request_bytes, drive.depth) as file:
        yield file


def _in_memory(folder: Path) -> bool:
    """Does the folder hold its files in memory? As Linux says of each device (proc_pid_mountinfo(5))."""
    mounts, number = Path("/proc/self/mountinfo"), folder.stat().st_dev
    lines = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else []
    device = f"{os.major(number)}:{os.minor(number)}"
    return any(fields[2] == device and fields[fields.index("-") + 1] in ("tmpfs", "ramfs") for fields in lines)


def held_experts(file: ExpertFile, prepared: Prepared, allocate: Allocate) -> HeldExperts:
    """The host's memory for experts of a run that reads them from ``file``."""
    capacity = host_bytes_of_run(prepared)
    assert capacity is not None
    return HeldExperts(file, capacity, prepared.shape.expert_bytes_by_layer[0], allocate)
