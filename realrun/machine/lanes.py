"""The lanes of a real machine: what the executor asks of them, whatever they are made of.

A lane does one piece of work after another, in the order in which it was given. Work may wait for work of other lanes.
Two machines have such lanes: ``host_lanes`` (threads and memory copies, on any computer) and ``cuda_lanes`` (streams).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from sim.machine.hardware import ResultPath

Work: TypeAlias = Callable[[], object]


def nothing() -> None:
    """Work that takes no time: submitted to learn when all before it, or all that it waits for, has ended."""


class Completion(Protocol):
    """One piece of work on a lane: that it has ended, and when it ran."""

    @property
    def ready_ns(self) -> int:
        """When it could have started: given to its lane, and all that it waits for has ended; known after ``wait``."""
        ...

    @property
    def start_ns(self) -> int:
        """When it started, on the machine's clock; known after ``wait``."""
        ...

    @property
    def end_ns(self) -> int:
        """When it ended, likewise."""
        ...

    def issued(self) -> Completion:
        """Block until the work has been given to its lane; the completion that stands for it there."""
        ...

    def wait(self) -> None:
        """Block until the work has ended and its ``done`` has been called. Raises LaneError if it failed."""
        ...

    def has_ended(self) -> bool:
        """Has the work ended, or failed? Never blocks."""
        ...


class Submitted(Completion, Protocol):
    """A completion as ``MachineLane.submit`` returns it."""

    @property
    def blocked_ns(self) -> int:
        """How long ``submit`` kept its caller waiting: for others, or, where the caller is the lane, for the work."""
        ...


class MachineLane(Protocol):
    """A serial resource."""

    def submit(self, work: Work, after: Sequence[Completion] = (), done: Work | None = None) -> Submitted:
        """Do ``work`` once what was submitted before, and all of ``after``, have ended; then call ``done``.

        ``work`` must not block on another lane: what it needs of others is in ``after``.
        ``done`` is not part of the time. It is called by the lane's thread or, where a lane has none, by whichever
        thread waits for a completion of the machine or calls ``Machine.poll``. Work after failed work fails too.
        """
        ...


class Machine(Protocol):
    """Lanes that belong together, their memory and their clock."""

    kind: str  # "host-lanes" or "cuda"
    device: torch.device  # of GPU tensors
    result_path: ResultPath
    gpu: MachineLane
    cpu: MachineLane  # experts on the CPU, on a chosen number of threads
    d2h: MachineLane  # routing and activations
    back: MachineLane  # victims that are written back
    link: MachineLane  # what else goes to the GPU over the link: used by the copy thread only

    def now_ns(self) -> int:
        """The machine's clock, ns."""
        ...

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that copies run from and to at full speed: pinned, where there is a GPU."""
        ...

    def gpu_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """GPU memory."""
        ...

    def readable(self, host: Tensor) -> Tensor:
        """A view of a ``host_tensor`` that work on the GPU may read in place."""
        ...

    def hosting(self) -> AbstractContextManager[None]:
        """In the block the calling thread is the host, on the host's core; then it is where it was before."""
        ...

    def begin_copying(self) -> None:
        """Called once by the thread that will call ``copy_in``."""
        ...

    def copy_in(self, target: Tensor, source: Tensor) -> Completion:
        """Copy ``source`` (host) to ``target`` (GPU) over the link, after the copies before it."""
        ...

    def poll(self) -> float | None:
        """Call the ``done`` of work that has ended; how soon to call again, s (None: there is no need to)."""
        ...

    def facts(self) -> dict[str, str]:
        """What this machine is, by name."""
        ...

    def settle(self) -> None:
        """Block until every lane is idle. Raises LaneError if work has failed."""
        ...

    def close(self) -> None:
        """End the lanes' threads and free what they hold."""
        ...
