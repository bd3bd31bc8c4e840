"""Protocols of a machine, its lanes and their work, which the executor depends on.

A lane does one piece of work after another, in the order of submission. Work may wait for work of other lanes. There
are two such machines: ``host_lanes`` (threads and memory copies, on any computer) and ``cuda_lanes`` (streams).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self, TypeAlias

import torch
from torch import Tensor

from sim.machine.devices import ResultPath

Work: TypeAlias = Callable[[], object]


def nothing() -> None:
    """Work that takes no time, submitted to find out when earlier work, or what it waits for, has ended."""


class Completion(Protocol):
    """One piece of work on a lane: whether it has ended, and when it ran."""

    @property
    def ready_ns(self) -> int:
        """Time at which it had been submitted and all that it waits for had ended, ns; known after ``wait``."""

    @property
    def start_ns(self) -> int:
        """Start, ns on the machine's clock; known after ``wait``."""

    @property
    def end_ns(self) -> int:
        """End, ns; known after ``wait``."""

    def issued(self) -> Completion:
        """Block until the work has been submitted to its lane; returns its completion there."""

    def wait(self) -> None:
        """Block until the work has ended and its ``done`` has been called. Raises LaneError if it failed."""

    def has_ended(self) -> bool:
        """True if the work has ended or failed. Never blocks."""


class OnItsLane:
    """A completion of work that is submitted by the time it is made."""

    def issued(self) -> Self:
        """Itself."""
        return self


def took_ns(completion: Completion) -> int:
    """Wait for the end of the work, and return its duration."""
    completion.wait()
    return completion.end_ns - completion.start_ns


class Submitted(Completion, Protocol):
    """The completion that ``MachineLane.submit`` returns."""

    @property
    def blocked_ns(self) -> int:
        """Time for which ``submit`` blocked its caller, ns: for other work or, on an inline lane, for its own."""


class MachineLane(Protocol):
    """A serial resource."""

    def submit(self, work: Work, after: Sequence[Completion] = (), done: Work | None = None) -> Submitted:
        """Do ``work`` after all earlier work of the lane and all of ``after`` have ended; then call ``done``.

        ``work`` must not block on another lane: what it needs from others is in ``after``. ``done`` is not part of its
        time. It is called by the lane's thread or, for a lane without one, by the next thread that waits for a
        completion of the machine or calls ``Machine.poll``. Work after failed work fails too.
        """


class Machine(Protocol):
    """The lanes of one computer, their memory and their clock."""

    kind: str  # "host-lanes" or "cuda"
    device: torch.device  # of GPU tensors
    result_path: ResultPath
    gpu: MachineLane
    cpu: MachineLane  # experts on the CPU
    d2h: MachineLane  # routing and activations
    back: MachineLane  # experts that are written back
    link: MachineLane  # other copies to the GPU; used by the copy thread only

    def card(self, number: int) -> Machine:
        """GPU ``number`` as a machine with lanes of its own, but the CPU, host memory and clock of this one, which is
        GPU 0 and closes all. Raises RefusedError for a GPU that there is not."""

    def select(self) -> None:
        """Make this GPU the one that the host thread works on."""

    def now_ns(self) -> int:
        """The machine's clock, ns."""

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory for copies at full speed: pinned, if there is a GPU."""

    def gpu_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """GPU memory."""

    def readable(self, host: Tensor) -> Tensor:
        """A view of a ``host_tensor`` that GPU work can read in place."""

    def hosting(self) -> AbstractContextManager[None]:
        """Make the calling thread the host thread in the block, on the host's core."""

    def begin_copying(self) -> None:
        """Prepare the calling thread for ``copy_in``; called once."""

    def copy_in(self, target: Tensor, source: Tensor) -> Completion:
        """Copy ``source`` (host) to ``target`` (GPU) over the link, after earlier copies."""

    def poll(self) -> float | None:
        """Call the ``done`` of work that has ended; returns after how many seconds to poll again (None: never)."""

    def facts(self) -> dict[str, str]:
        """A description of this machine, by name."""

    def settle(self) -> None:
        """Block until every lane is idle. Raises LaneError if work has failed."""

    def close(self) -> None:
        """End the lanes' threads and free what they hold."""
