"""The CUDA machine: lanes that are streams of a GPU, and a thread for experts on the CPU, which several GPUs share.

Rules for callers, in addition to the protocol:

- The thread that creates the machine is the host thread. Until ``close`` its current stream is the compute stream, so
  that its GPU work outside ``submit`` is in order with the GPU lane. No lane waits for the default stream.
- torch reuses freed GPU memory for the next tensor of the same stream, without regard to other streams. A tensor that
  is used on another lane than its own, and host memory that is copied, must therefore be kept until the host has
  waited for the completion of that work. Fixed buffers always are; ``record_stream`` is never called.
- Work copies with ``non_blocking=True``; otherwise the submitting thread waits for everything in its stream.
- The host thread and the copy thread spin while they wait: leave each a physical core, as ``cores.cuda_cores`` does.
- GPU work that needs results of CPU experts is launched before these are ready: its stream waits for a flag that the
  CPU's thread sets (``stream_flags``). If the driver has no such wait, the host waits instead, and its next launches
  are later than in the simulator; the machine's facts say so.
- Of several GPUs the host thread works on the selected one (``select``): kernels that it launches outside ``submit``
  need tensors of that device. Each device has a compute stream that is current, so that copies by ``Tensor.to`` from
  one to the other are in order with both GPU lanes (torch makes the streams of both wait).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import get_args

import torch
from torch import Tensor

from realrun.errors import RefusedError
from realrun.machine.cores import Team, alone, crowding, most_cpu_threads, usable_cores
from realrun.machine.cuda_memory import (
    StreamFlag,
    gpu_tensor,
    gpu_view,
    limit_gpu_memory,
    stream_flag,
    why_unreadable,
)
from realrun.machine.cuda_streams import GpuClock, StreamCompletion, StreamLane
from realrun.machine.facts import cpu_facts, gpu_facts
from realrun.machine.lanes import MachineLane, nothing
from realrun.machine.pinned import Pinned
from realrun.machine.thread_lane import ThreadLane, settle_thread, settled, wake_in_time
from sim.machine.devices import ResultPath
from trilane.common.units import gb

# Between polls for ended work, if there is any to poll for, and otherwise. Chosen short next to the copy of an expert
# (about 1 ms), and long enough to leave the interpreter to the host thread.
POLL_S, REST_S = 50e-6, 1e-3

RUNTIMES = ("eager", "graphs")  # how kernels are launched


@dataclass(frozen=True)
class CudaSettings:
    """The choice of a GPU, and of its use.

    ``cpu_threads`` compute experts on ``cpu_cores`` (None: on any); the copy thread runs on ``copy_core`` and the host
    thread on ``host_core`` (None: on any). Copies to the GPU are split into chunks of ``chunk_bytes`` (0: whole),
    between which other transfers can start. ``result_path``: the GPU reads the CPU's results in place ("direct"), or
    they queue behind expert copies ("h2d"); None: in place if this GPU can. ``memory_bytes``: what torch may allocate
    (None: all). ``runtime``: replays launch a model kernel by kernel ("eager"), or decode steps outside routed experts
    as recorded graphs ("graphs"). A profile is valid for the runtime in which it was measured.
    """

    device_index: int = 0
    cpu_threads: int = field(default_factory=most_cpu_threads)
    cpu_cores: tuple[int, ...] | None = None
    chunk_bytes: int = 4 << 20
    result_path: ResultPath | None = None
    memory_bytes: int | None = None
    copy_core: int | None = None
    host_core: int | None = None
    runtime: str = "eager"

    def check(self) -> None:
        """Raises RefusedError for settings that this computer cannot fulfil."""
        if self.cpu_threads < 1 or self.chunk_bytes < 0 or self.result_path not in (None, *get_args(ResultPath)):
            raise RefusedError(
                "cuda: expected cpu_threads >= 1, chunk_bytes >= 0 and result_path direct or h2d, "
                f"got {self.cpu_threads}, {self.chunk_bytes} and {self.result_path}"
            )
        if self.runtime not in RUNTIMES:
            raise RefusedError(f"cuda: expected a runtime among {', '.join(RUNTIMES)}, got {self.runtime!r}")
        chosen = (*(self.cpu_cores or ()), *(alone(self.copy_core) or ()), *(alone(self.host_core) or ()))
        missing = sorted(set(chosen) - usable_cores())
        if missing or self.cpu_cores == ():
            raise RefusedError(f"cuda: expected cores among {sorted(usable_cores())}, got {missing or 'none'}")
        self._check_device()

    def _check_device(self) -> None:
        if not torch.cuda.is_available():
            raise RefusedError(
                f"cuda: expected a GPU, torch {torch.__version__} finds none; install a CUDA build of torch and a "
                "driver, or use host lanes"
            )
        count = torch.cuda.device_count()
        if not 0 <= self.device_index < count:
            raise RefusedError(f"cuda: expected a device from 0 to {count - 1}, got {self.device_index}")
        free, total = torch.cuda.mem_get_info(self.device_index)
        if self.memory_bytes is not None and not 0 < self.memory_bytes <= free:
            raise RefusedError(
                f"cuda: expected GPU memory of at most the {gb(free)} that are free of {gb(total)}, got "
                f"{gb(self.memory_bytes)}; choose less (--memory-gb; MEMORY_GB for examples/gpu.sh)"
            )


class CudaLanes:
    """The lanes of one GPU. ``settings``: as given, with the chosen result path.

    ``first``: the lanes of GPU 0, whose CPU thread and host memory those of a further GPU share.
    """

    kind = "cuda"
    _pinned: Pinned
    _flag: StreamFlag | None
    _cpu: ThreadLane

    def __init__(self, settings: CudaSettings | None = None, *, first: CudaLanes | None = None) -> None:
        settings = settings or CudaSettings()
        settings.check()
        self.device = torch.device("cuda", settings.device_index)
        torch.cuda.set_device(self.device)
        limit_gpu_memory(self.device, settings.memory_bytes)
        self._pinned, self._cores = Pinned() if first is None else first._pinned, usable_cores()
        self.result_path, remark = self._result_path(settings.result_path)
        self.settings = replace(settings, result_path=self.result_path)
        self.crowding = crowding(self._teams())  # "", or why times here are no measure of fidelity
        self._remarks = tuple(filter(None, (remark, self.crowding)))
        self._clock = GpuClock(self.device)
        homes = {"gpu": threading.get_ident(), "d2h": None, "back": None, "link": None}
        self._streams = {name: StreamLane(name, self.device, self._clock, home) for name, home in homes.items()}
        self._flag = stream_flag(self._streams["gpu"].stream) if first is None else first._flag
        self._cpu = first._cpu if first is not None else ThreadLane(
            "cpu", self.settings.cpu_cores, self.settings.cpu_threads, self._flag
        )
        self.gpu: MachineLane = self._streams["gpu"]
        self.cpu: MachineLane = self._cpu
        self.d2h: MachineLane = self._streams["d2h"]
        self.back: MachineLane = self._streams["back"]
        self.link: MachineLane = self._streams["link"]
        self._outer_stream = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self._streams["gpu"].stream)
        self._further: list[CudaLanes] = []

    def card(self, number: int) -> CudaLanes:
        """GPU ``number``: 0 is that of the settings, the others follow in CUDA's order; made when first asked for.

        Raises RefusedError if there are fewer devices.
        """
        while len(self._further) < number:
            self._further.append(self._next_card(number))
        self.select()
        return self._further[number - 1] if number else self

    def _next_card(self, number: int) -> CudaLanes:
        own, count = self.settings.device_index, torch.cuda.device_count()
        others = [device for device in range(count) if device != own]
        if number > len(others):
            raise RefusedError(
                f"cuda: expected gpus {count} at most, the devices that torch finds, got {number + 1}; choose host "
                "lanes (`--lanes host-lanes`), which may be any number"
            )
        made = len(self._further)
        return CudaLanes(replace(self.settings, device_index=others[made]), first=self)

    def select(self) -> None:
        """Make this GPU torch's current device in the calling thread."""
        torch.cuda.set_device(self.device)

    def now_ns(self) -> int:
        """Nanoseconds of the performance counter."""
        return time.perf_counter_ns()

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned memory of exactly that size. Raises RefusedError if the system locks no more memory."""
        return self._pinned(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)

    def remarks(self) -> tuple[str, ...]:
        """Remarks for the user, a line each; complete after memory has been allocated."""
        return (*self._remarks, *self._pinned.remarks())

    def gpu_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros, for buffers that are allocated before a run. Raises RefusedError if they do not fit."""
        return gpu_tensor(shape, dtype, self.device)

    def readable(self, host: Tensor) -> Tensor:
        """A view of pinned memory, which kernels read over the link."""
        return gpu_view(host, self.device)

    def hosting(self) -> AbstractContextManager[None]:
        """Run the calling thread on the host's core in the block, with one torch thread."""
        return settled(self.settings.host_core)

    def begin_copying(self) -> None:
        """Set the device, which each thread has, and the core, which would be inherited from the starting thread."""
        torch.cuda.set_device(self.device)
        settle_thread(alone(self.settings.copy_core) or self._cores, 1)
        wake_in_time()

    def copy_in(self, target: Tensor, source: Tensor) -> StreamCompletion:
        """Start a copy. ``source`` [bytes] must be pinned; ``target`` has at least as many bytes."""
        return self._streams["link"].submit(lambda: self._copy_chunks(target[: len(source)], source))

    def poll(self) -> float:
        """As in ``Machine``: soon if work has a ``done``, otherwise rarely, since the host may submit such work."""
        pending = [lane.callbacks.run(wait=False) for lane in self._streams.values()]
        return POLL_S if any(pending) else REST_S

    def rebase(self) -> None:
        """Compare the clocks of GPU and host again."""
        self._clock.rebase()

    def settle(self) -> None:
        """Block until every lane is idle. Raises LaneError if work has failed."""
        self._cpu.submit(nothing).wait()
        for lane in self._streams.values():
            lane.settle()
        self.rebase()

    def close(self) -> None:
        """End the threads, lift the memory limits and restore the streams of the host thread."""
        self._cpu.close()
        for lanes in (*reversed(self._further), self):
            torch.cuda.set_stream(lanes._outer_stream)
            limit_gpu_memory(lanes.device, None)
        self.select()

    def facts(self) -> dict[str, str]:
        """A description of this machine; "unknown" where the system has no answer."""
        waits = "the GPU's streams" if self._flag is not None else "the host"
        return cpu_facts() | gpu_facts(self.device) | {"cpu_results_awaited_by": waits}

    def _result_path(self, chosen: ResultPath | None) -> tuple[ResultPath, str]:
        """The path of the CPU's results to the GPU, and a remark if it is not the expected one. Raises RefusedError."""
        if chosen == "h2d":
            return chosen, ""
        why = why_unreadable(self.host_tensor((2048,), torch.bfloat16), self.device)
        if why and chosen is not None:
            raise RefusedError(
                f"cuda: result path direct expects that the GPU reads what the CPU writes to pinned memory: {why}; "
                "choose --result-path h2d, or leave it out"
            )
        remark = "the GPU does not read what the CPU writes to pinned memory, so the CPU's results queue behind copies"
        return ("h2d", f"{remark} of experts (result path h2d): {why}") if why else ("direct", "")

    def _teams(self) -> dict[str, Team]:
        """The threads that work at the same time."""
        made = self.settings
        host, copies = (Team(1, alone(core)) for core in (made.host_core, made.copy_core))
        return {"host": host, "copies": copies, "CPU experts": Team(made.cpu_threads, made.cpu_cores)}

    def _copy_chunks(self, target: Tensor, source: Tensor) -> None:
        chunk = self.settings.chunk_bytes or len(source)
        for begin in range(0, len(source), chunk):
            target[begin : begin + chunk].copy_(source[begin : begin + chunk], non_blocking=True)
