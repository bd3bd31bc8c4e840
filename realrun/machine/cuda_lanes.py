"""The CUDA machine: lanes that are streams of one GPU, and a thread for experts on the CPU.

What callers must keep to, besides the protocol:

- The thread that makes the machine is the host thread: until ``close`` its current stream is the compute stream, so
  that what it does on the GPU outside ``submit`` is in order with the GPU lane. No lane waits for the default stream.
- torch gives freed GPU memory to the next tensor of the stream on which it was made, without regard to other streams.
  A tensor that is used on another lane than its own, and host memory that is copied, must therefore be held until the
  host has waited for the completion of that work. Fixed buffers always are; nobody calls ``record_stream``.
- Work copies with ``non_blocking=True``, else the submitting thread waits for all that its stream has been given.
- The host and the copy thread wait by spinning: leave them a physical core each, as ``cores.cuda_cores`` does.
- GPU work that needs results of the CPU's experts is launched before these are there: its stream waits for a flag that
  the CPU's thread sets (``stream_flags``). Where the driver has no such wait, the host waits in its place, and what it
  launches next comes later than the simulator has it; the machine's facts say so.
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
from realrun.machine.cuda_memory import gpu_tensor, gpu_view, limit_gpu_memory, why_unreadable
from realrun.machine.cuda_streams import StreamCompletion, StreamLane
from realrun.machine.facts import cpu_facts, gpu_facts
from realrun.machine.gpu_clock import GpuClock
from realrun.machine.host_memory import gb
from realrun.machine.lanes import MachineLane, nothing
from realrun.machine.pinned import Pinned
from realrun.machine.stream_flags import stream_flag
from realrun.machine.thread_lane import ThreadLane, settle_thread, settled, wake_in_time
from sim.costs.runtimes import RUNTIMES
from sim.machine.hardware import ResultPath

# Between looks for ended work: while there is any to look for, and otherwise. Choices: short next to a copy of an
# expert (about 1 ms), and rare enough to leave Python to the host thread.
POLL_S, REST_S = 50e-6, 1e-3


@dataclass(frozen=True)
class CudaSettings:
    """Which GPU, and how it is used.

    ``cpu_threads`` compute experts, on ``cpu_cores`` (None: on any); the copy thread runs on ``copy_core`` and the host
    thread on ``host_core`` (None: on any). Copies to the GPU go in chunks of ``chunk_bytes`` (0: whole), between which
    other transfers can pass. ``result_path``: the GPU reads the CPU's results in place ("direct"), or they queue behind
    expert copies ("h2d"); None: in place where this GPU can. ``memory_bytes``: what torch may allocate (None: all).
    ``runtime``: replays launch a model kernel by kernel ("eager"), or decode steps outside routed experts as recorded
    graphs ("graphs"). A profile has the times of the one that it was measured in, and its machine no other.
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
        """Raises RefusedError for what this computer does not have."""
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
                f"{gb(self.memory_bytes)}; ask for less (--memory-gb; MEMORY_GB of examples/gpu.sh)"
            )


class CudaLanes:
    """See the top of this file. ``settings`` say what was chosen where that was left open."""

    kind = "cuda"

    def __init__(self, settings: CudaSettings | None = None) -> None:
        settings = settings or CudaSettings()
        settings.check()
        self.device = torch.device("cuda", settings.device_index)
        torch.cuda.set_device(self.device)
        limit_gpu_memory(self.device, settings.memory_bytes)
        self._pinned, self._cores = Pinned(), usable_cores()
        self.result_path, remark = self._result_path(settings.result_path)
        self.settings = replace(settings, result_path=self.result_path)
        self.crowding = crowding(self._teams())  # "", or why fidelity cannot be judged here
        self._remarks = tuple(filter(None, (remark, self.crowding)))
        self._clock = GpuClock(self.device)
        homes = {"gpu": threading.get_ident(), "d2h": None, "back": None, "link": None}
        self._streams = {name: StreamLane(name, self.device, self._clock, home) for name, home in homes.items()}
        self._flag = stream_flag(self._streams["gpu"].stream)
        self._cpu = ThreadLane("cpu", self.settings.cpu_cores, self.settings.cpu_threads, self._flag)
        self.gpu: MachineLane = self._streams["gpu"]
        self.cpu: MachineLane = self._cpu
        self.d2h: MachineLane = self._streams["d2h"]
        self.back: MachineLane = self._streams["back"]
        self.link: MachineLane = self._streams["link"]
        self._outer_stream = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self._streams["gpu"].stream)

    def now_ns(self) -> int:
        """Nanoseconds of the performance counter."""
        return time.perf_counter_ns()

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned memory of exactly that size. Raises RefusedError where the system locks no more."""
        return self._pinned(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)

    def remarks(self) -> tuple[str, ...]:
        """What is worth knowing of it once it has its memory, a line each."""
        return (*self._remarks, *self._pinned.remarks())

    def gpu_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros. Raises RefusedError where they do not fit; for buffers that are made before a run."""
        return gpu_tensor(shape, dtype, self.device)

    def readable(self, host: Tensor) -> Tensor:
        """The same memory, read over the link by whichever kernel uses it."""
        return gpu_view(host, self.device)

    def hosting(self) -> AbstractContextManager[None]:
        """The calling thread has the host's core, and one thread for torch."""
        return settled(self.settings.host_core)

    def begin_copying(self) -> None:
        """The current device is a thread's own; its core would be that of the thread that began it."""
        torch.cuda.set_device(self.device)
        settle_thread(alone(self.settings.copy_core) or self._cores, 1)
        wake_in_time()

    def copy_in(self, target: Tensor, source: Tensor) -> StreamCompletion:
        """Under way when it returns; ``source`` [bytes] must be pinned, ``target`` has as many bytes or more."""
        return self._streams["link"].submit(lambda: self._copy_chunks(target[: len(source)], source))

    def poll(self) -> float:
        """See ``Machine``: soon while work has a ``done``, else now and then, since the host may submit some."""
        pending = [lane.callbacks.run(wait=False) for lane in self._streams.values()]
        return POLL_S if any(pending) else REST_S

    def rebase(self) -> None:
        """Compare the clocks of GPU and host anew."""
        self._clock.rebase()

    def settle(self) -> None:
        """Block until every lane is idle. Raises LaneError if work has failed."""
        self._cpu.submit(nothing).wait()
        for lane in self._streams.values():
            lane.settle()
        self.rebase()

    def close(self) -> None:
        """End the threads, lift the memory limit and give the host thread its stream back."""
        self._cpu.close()
        torch.cuda.set_stream(self._outer_stream)
        limit_gpu_memory(self.device, None)

    def facts(self) -> dict[str, str]:
        """What this machine is, in words; "unknown" for what nobody can say."""
        waits = "the GPU's streams" if self._flag is not None else "the host"
        return cpu_facts() | gpu_facts(self.device) | {"cpu_results_awaited_by": waits}

    def _result_path(self, asked: ResultPath | None) -> tuple[ResultPath, str]:
        """How the CPU's results come over, and a remark where that is not as one would expect. Raises RefusedError."""
        if asked == "h2d":
            return asked, ""
        why = why_unreadable(self.host_tensor((2048,), torch.bfloat16), self.device)
        if why and asked is not None:
            raise RefusedError(
                f"cuda: expected that the GPU reads what the CPU writes to pinned memory, which result path direct "
                f"needs: {why}; choose --result-path h2d, or leave it out"
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
