"""Processor cores: those that this process may use, which of them are one physical core, and which thread gets which.

SMT siblings share the units and caches of one physical core, so they count once. The host thread and the copy thread of
a GPU's machine spin while they wait, and one thread of an OpenMP team that loses its core holds up the whole team:
threads that work at the same time get physical cores of their own as long as there are any.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

TOPOLOGY = Path("/sys/devices/system/cpu")  # https://docs.kernel.org/admin-guide/cputopology.html
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: https://docs.kernel.org/admin-guide/cgroup-v2.html
Cores: TypeAlias = tuple[int, ...]


def usable_cores() -> set[int]:
    """Logical cores that this thread may use: those of the process, unless the thread has been bound."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def physical_cores() -> list[Cores]:
    """The usable logical cores of every physical core, ascending; each is one where the system says nothing.

    In a container that may use less CPU time than it sees cores, no more than that time is worth: threads beyond it
    would all be halted once it is used up.
    """
    usable = usable_cores()
    return sorted({tuple(sorted(_siblings(core) & usable)) for core in usable})[: _quota_cores()]


def most_cpu_threads(cpu_cores: Collection[int] | None = None) -> int:
    """Threads that may compute experts: one for each physical core of ``cpu_cores`` (None: of all).

    Two of all cores are left to the host and the copies, but there is one thread at least.
    """
    there = physical_cores()
    theirs = sum(cpu_cores is None or not set(core).isdisjoint(cpu_cores) for core in there)
    return max(1, min(theirs, len(there) - 2))


def host_lane_cores(gpu_core: int | None = None, cpu_cores: Cores | None = None) -> dict[str, int | Cores | None]:
    """Settings of host lanes, by name: the GPU's core first, then the CPU experts', the copies' and the host's.

    Of three cores the third is both the copies' and the host's; of two, copies run next to CPU experts, and the host
    anywhere. ``gpu_core`` and ``cpu_cores`` may have been chosen: the others avoid them.
    """
    free = _free({*(cpu_cores or ()), *(() if gpu_core is None else (gpu_core,))})
    if gpu_core is None:
        gpu_core = free.pop(0) if free else min(usable_cores())
    spare = free[1 if cpu_cores is None else 0 :][-2:]
    cpu_cores = cpu_cores or tuple(free[: len(free) - len(spare)]) or (gpu_core,)
    copy_core, host_core = (spare[0], spare[-1]) if spare else (None, None)
    return {"gpu_core": gpu_core, "cpu_cores": cpu_cores, "copy_core": copy_core, "host_core": host_core}


def cuda_cores(cpu_cores: Cores | None = None) -> dict[str, int | Cores | None]:
    """Settings of a GPU's machine, by name: the first core is the host's, the last the copies', others compute experts.

    Where there are not enough, nothing is bound. ``cpu_cores`` may have been chosen: the others avoid them.
    """
    free, threads = _free(cpu_cores or ()), most_cpu_threads(cpu_cores)
    if len(free) < (3 if cpu_cores is None else 2):
        return {"cpu_threads": threads, "cpu_cores": cpu_cores, "copy_core": None, "host_core": None}
    host_core, *others, copy_core = free
    cpu_cores = cpu_cores or tuple(others)
    return {"cpu_threads": threads, "cpu_cores": cpu_cores, "copy_core": copy_core, "host_core": host_core}


def alone(core: int | None) -> Cores | None:
    """The cores of a single thread: that one, or None for any."""
    return None if core is None else (core,)


class Team(NamedTuple):
    """Threads that work at the same time, on ``cores`` (None: on any)."""

    threads: int
    cores: Collection[int] | None


def crowding(teams: Mapping[str, Team]) -> str:
    """Why times of these threads are not what lanes take that overlap freely; "" where each has a physical core."""
    threads = sum(team.threads for team in teams.values())
    free = sum(team.threads for team in teams.values() if team.cores is None)
    there, bound = physical_cores(), {core for team in teams.values() for core in team.cores or ()}
    taken = sum(not bound.isdisjoint(core) for core in there)
    cores = taken + min(free, len(there) - taken)
    if threads <= cores:
        return ""
    return (
        f"not for fidelity: more threads than cores: {threads} threads ({', '.join(teams)}) on {cores} physical "
        f"core{'s' * (cores != 1)}"
    )


def _free(taken: Collection[int]) -> list[int]:
    """One logical core of every physical one that has nothing of ``taken``."""
    return [core[0] for core in physical_cores() if set(core).isdisjoint(taken)]


def _quota_cores() -> int | None:
    """Cores that the container's CPU time is worth, one at least; None where there is no limit."""
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):  # "max 100000": no limit
        return None


def _siblings(core: int) -> set[int]:
    """Logical cores of the same physical one, itself among them; the file says "0,8" or "0-1"."""
    try:
        text = (TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        ends = [part.split("-") for part in text.strip().split(",")]
        return {core, *(each for end in ends for each in range(int(end[0]), int(end[-1]) + 1))}
    except (OSError, ValueError):
        return {core}
