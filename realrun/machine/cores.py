"""Processor cores: which ones this process may use, which belong to one physical core, and which thread runs on which.

SMT siblings share the units and caches of one physical core, so they count once. The host thread and the copy thread of
a CUDA machine spin while they wait, and a thread that loses its core delays its whole OpenMP team. So threads that work
at the same time get physical cores of their own, as long as there are enough.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from trilane.common.computer import physical_core_count, threads_a_core

TOPOLOGY = Path("/sys/devices/system/cpu")  # https://docs.kernel.org/admin-guide/cputopology.html
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # in a container: https://docs.kernel.org/admin-guide/cgroup-v2.html
Cores: TypeAlias = tuple[int, ...]


def usable_cores() -> set[int]:
    """Logical cores that this thread may use: those of the process, unless the thread has been bound."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    import psutil

    process = psutil.Process()
    known = hasattr(process, "cpu_affinity")  # on Windows; macOS binds nothing
    return set(process.cpu_affinity()) if known else set(range(psutil.cpu_count() or 1))


def physical_cores() -> list[Cores]:
    """Usable logical cores of every physical core, ascending; one each if the system does not tell them apart.

    Other systems than Linux number the logical cores of a physical one in succession.
    A container's quota of CPU time limits their number: more threads would all be halted when the quota is used up.
    """
    usable = usable_cores()
    return sorted({tuple(sorted(_siblings(core) & usable)) for core in usable})[: _most_cores()]


def most_cpu_threads(cpu_cores: Collection[int] | None = None) -> int:
    """The number of threads for CPU experts: one for each physical core of ``cpu_cores`` (None: of all).

    Two cores are left to the host and to copies, but there is at least one thread.
    """
    cores = physical_cores()
    chosen = sum(cpu_cores is None or not set(core).isdisjoint(cpu_cores) for core in cores)
    return max(1, min(chosen, len(cores) - 2))


def host_lane_cores(gpu_core: int | None = None, cpu_cores: Cores | None = None) -> dict[str, int | Cores | None]:
    """Settings of host lanes, by name: the first core plays the GPU, the next ones compute experts, then copies, host.

    With three cores, copies and the host share the third; with two, copies share the core of CPU experts and the host
    thread is not bound. Chosen values of ``gpu_core`` and ``cpu_cores`` are kept, and avoided by the others.
    """
    free = _free({*(cpu_cores or ()), *(() if gpu_core is None else (gpu_core,))})
    if gpu_core is None:
        gpu_core = free.pop(0) if free else min(usable_cores())
    spare = free[1 if cpu_cores is None else 0 :][-2:]
    cpu_cores = cpu_cores or tuple(free[: len(free) - len(spare)]) or (gpu_core,)
    copy_core, host_core = (spare[0], spare[-1]) if spare else (None, None)
    return {"gpu_core": gpu_core, "cpu_cores": cpu_cores, "copy_core": copy_core, "host_core": host_core}


def cuda_cores(cpu_cores: Cores | None = None) -> dict[str, int | Cores | None]:
    """Settings of a CUDA machine, by name: the first core is for the host, the last for copies, the others for experts.

    With too few cores, no thread is bound. Chosen ``cpu_cores`` are kept, and avoided by the others.
    """
    free, threads = _free(cpu_cores or ()), most_cpu_threads(cpu_cores)
    if len(free) < (3 if cpu_cores is None else 2):
        return {"cpu_threads": threads, "cpu_cores": cpu_cores, "copy_core": None, "host_core": None}
    host_core, *others, copy_core = free
    cpu_cores = cpu_cores or tuple(others)
    return {"cpu_threads": threads, "cpu_cores": cpu_cores, "copy_core": copy_core, "host_core": host_core}


def alone(core: int | None) -> Cores | None:
    """The cores of a single thread: ``core`` alone, or None for any."""
    return None if core is None else (core,)


class Team(NamedTuple):
    """Threads that work at the same time, on ``cores`` (None: on any)."""

    threads: int
    cores: Collection[int] | None


def crowding(teams: Mapping[str, Team]) -> str:
    """The reason why these threads' times are no measure of lanes that overlap freely; "" if each has a physical core.
    """
    threads = sum(team.threads for team in teams.values())
    free = sum(team.threads for team in teams.values() if team.cores is None)
    physical, bound = physical_cores(), {core for team in teams.values() for core in team.cores or ()}
    taken = sum(not bound.isdisjoint(core) for core in physical)
    cores = taken + min(free, len(physical) - taken)
    if threads <= cores:
        return ""
    return (
        f"not for fidelity: more threads than cores: {threads} threads ({', '.join(teams)}) on {cores} physical "
        f"core{'s' * (cores != 1)}"
    )


def _free(taken: Collection[int]) -> list[int]:
    """One logical core of every physical core without any of ``taken``."""
    return [core[0] for core in physical_cores() if set(core).isdisjoint(taken)]


def _most_cores() -> int | None:
    """Quota of CPU time of the container, in cores, at least one; the computer's cores where Linux does not list them;
    None without a limit."""
    if sys.platform != "linux":
        return physical_core_count()
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):  # "max 100000": no limit
        return None


def _siblings(core: int) -> set[int]:
    """Logical cores of the same physical core, itself included; the file has a form such as "0,8" or "0-1"."""
    if sys.platform != "linux":
        threads = threads_a_core()
        return {*range(core - core % threads, core - core % threads + threads)}
    try:
        text = (TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        ends = [part.split("-") for part in text.strip().split(",")]
        return {core, *(sibling for end in ends for sibling in range(int(end[0]), int(end[-1]) + 1))}
    except (OSError, ValueError):
        return {core}
