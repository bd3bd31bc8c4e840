"""Host lanes: a machine made of threads and memory copies, which runs everything that a CUDA machine runs.

One core plays the GPU: its experts must be in an arena of slots, into which a link copies them. The link makes real
copies in chunks, paced to a configured bandwidth. Other cores compute experts, as the CPU. All work is real; only the
link sleeps between chunks, to keep its pace.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from realrun.errors import RefusedError
from realrun.machine.cores import Team, alone, crowding, usable_cores
from realrun.machine.facts import cpu_facts
from realrun.machine.lanes import Completion, MachineLane, nothing
from realrun.machine.pinned import plain
from realrun.machine.thread_lane import InlineLane, ThreadLane, settle_thread, settled
from sim.machine.devices import ResultPath


@dataclass(frozen=True)
class HostLaneSettings:
    """The cores of the lanes, and the speed of the link.

    ``gpu_core`` plays the GPU, ``cpu_cores`` compute experts. Copies in both directions run on ``copy_core`` (None: on
    ``cpu_cores``); the host thread runs on ``host_core`` (None: on any).
    """

    gpu_core: int = 0
    cpu_cores: tuple[int, ...] = (1,)
    link_bytes_per_s: float = 4e9
    link_latency_ns: int = 20_000
    chunk_bytes: int = 1 << 20
    copy_core: int | None = None
    host_core: int | None = None

    @property
    def copy_cores(self) -> tuple[int, ...]:
        """The cores for copies."""
        return alone(self.copy_core) or self.cpu_cores

    def check(self) -> None:
        """Raises RefusedError for cores that this process may not use, and for a link without speed."""
        usable, host_cores = usable_cores(), alone(self.host_core) or ()
        missing = sorted({self.gpu_core, *self.cpu_cores, *self.copy_cores, *host_cores} - usable)
        if missing or not self.cpu_cores:
            raise RefusedError(
                f"host lanes: expected cores among {sorted(usable)}, got {missing or 'none'} for the CPU"
            )
        if self.link_bytes_per_s <= 0 or self.chunk_bytes < 1:
            raise RefusedError("host lanes: link_bytes_per_s and chunk_bytes must be above 0")


class HostLanes:
    """The lanes. ``inline``: the calling thread plays the GPU, as it must when a library's model runs in it.

    ``cpu``: the lane of another GPU's machine, to share. Threads of further GPUs run on the cores of the first: of GPUs
    that divide the layers one computes at a time, but their copies may share a core.
    """

    kind = "host-lanes"
    device = torch.device("cpu")
    result_path: ResultPath = "direct"

    def __init__(
        self, settings: HostLaneSettings | None = None, *, inline: bool = False, cpu: ThreadLane | None = None
    ) -> None:
        self.settings = settings or HostLaneSettings()
        self.settings.check()
        cpu_cores = self.settings.cpu_cores
        self._gpu = None if inline else ThreadLane("gpu", (self.settings.gpu_core,))
        self._cpu = ThreadLane("cpu", cpu_cores, len(cpu_cores)) if cpu is None else cpu
        self._back = ThreadLane("back", self.settings.copy_cores)
        self.gpu: MachineLane = self._gpu or InlineLane()
        self.cpu: MachineLane = self._cpu
        self.d2h: MachineLane = InlineLane()
        self.back: MachineLane = self._back
        self.link: MachineLane = InlineLane()
        self.crowding = crowding(self._teams())  # "", or why times here are no measure of fidelity
        self._further: list[HostLanes] = []

    def card(self, number: int) -> HostLanes:
        """GPU ``number``; its threads are started when it is first asked for."""
        while len(self._further) < number:
            self._further.append(type(self)(self.settings, inline=self._gpu is None, cpu=self._cpu))
        return self._further[number - 1] if number else self

    def select(self) -> None:
        """Nothing to do: a thread's memory is that of all GPUs."""

    def now_ns(self) -> int:
        """Nanoseconds of the performance counter."""
        return time.perf_counter_ns()

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Ordinary memory with all of its pages mapped."""
        return plain(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)

    gpu_tensor = host_tensor

    def remarks(self) -> tuple[str, ...]:
        """Remarks for the user, a line each."""
        return (self.crowding,) if self.crowding else ()

    def readable(self, host: Tensor) -> Tensor:
        """The tensor itself."""
        return host

    def hosting(self) -> AbstractContextManager[None]:
        """Run the calling thread on the host's core (inline: the GPU's) in the block, with one torch thread."""
        return settled(self.settings.gpu_core if self._gpu is None else self.settings.host_core)

    def begin_copying(self) -> None:
        """Bind the link's thread to its own core or to those of CPU experts, so that it never disturbs the GPU."""
        settle_thread(self.settings.copy_cores, 1)

    def copy_in(self, target: Tensor, source: Tensor) -> Completion:
        """A paced copy in the calling thread, which has ended on return."""
        return self.link.submit(lambda: self.paced_copy(target, source))

    def paced_copy(self, target: Tensor, source: Tensor) -> None:
        """Copy chunk by chunk; each ends no earlier than on a link of the configured speed."""
        chunk, rate, target = self.settings.chunk_bytes, self.settings.link_bytes_per_s, target[: len(source)]
        begin_ns = time.perf_counter_ns() + self.settings.link_latency_ns
        for offset in range(0, len(source), chunk):
            target[offset : offset + chunk].copy_(source[offset : offset + chunk])
            due_ns = begin_ns + min(offset + chunk, len(source)) / rate * 1e9
            time.sleep(max(0.0, due_ns - time.perf_counter_ns()) / 1e9)

    def poll(self) -> None:
        """Nothing to do: the lanes' threads call ``done``."""

    def settle(self) -> None:
        """Block until every lane is idle, even if one has failed."""
        with ExitStack() as every:
            for lane in (self.cpu, self.back, self.gpu, self.d2h, self.link):  # inline lanes last
                every.callback(lane.submit(nothing).wait)

    def close(self) -> None:
        own = (lane for each in (*self._further, self) for lane in (each._gpu, each._back))
        for lane in (*own, self._cpu):
            if lane is not None:
                lane.close()

    def facts(self) -> dict[str, str]:
        return cpu_facts()

    def _teams(self) -> dict[str, Team]:
        """The threads that work at the same time; if inline, the host thread is the GPU's."""
        made = self.settings
        host = {} if self._gpu is None else {"host": Team(1, alone(made.host_core))}
        experts = Team(len(made.cpu_cores), made.cpu_cores)
        return {"GPU": Team(1, (made.gpu_core,)), "CPU experts": experts, "link": Team(1, made.copy_cores), **host}
