"""A machine on which everything takes a time typed by hand: what is measured on it must come out exactly.

Nothing waits for real. Work is done as soon as it is submitted, its times are worked out, and the clock of the host
jumps to the end of whatever it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from realrun.experts.ffn import SwiGlu
from realrun.machine.lanes import Completion, Work

SUBMIT_NS = 10  # of the host, each time
HAND_OVER_NS = {"gpu": 7, "cpu": 9, "d2h": 40, "back": 3, "link": 0}  # until a lane that rests learns of its work
EACH_NS = {"gpu": 0, "cpu": 0, "d2h": 5, "back": 8000, "link": 7000}  # besides what the work itself spends
FIRST_NS = 300  # what the CPU's first expert takes longer


@dataclass
class FakeMark:
    """Known times."""

    machine: FakeMachine
    ready_ns: int
    start_ns: int
    end_ns: int
    blocked_ns: int = 0

    def issued(self) -> FakeMark:
        return self

    def has_ended(self) -> bool:
        return True

    def wait(self) -> None:
        if threading.current_thread() is threading.main_thread():  # the copy thread has no say in the host's time
            self.machine.clock_ns = max(self.machine.clock_ns, self.end_ns)


@dataclass
class FakeLane:
    """``inline``: the caller waits, and hears of what it waits for with a delay."""

    machine: FakeMachine
    name: str
    inline: bool = False
    free_ns: int = 0

    def submit(self, work: Work, after: Sequence[Completion] = (), done: Work | None = None) -> FakeMark:
        ends = [completion.issued().end_ns for completion in after]
        if self.name != "link":
            self.machine.clock_ns += SUBMIT_NS
        ready = max(self.machine.clock_ns, *ends, 0)
        rested = ready > (self.machine.clock_ns if self.inline else self.free_ns)
        start = max(ready, self.free_ns) + (HAND_OVER_NS[self.name] if rested else 0)
        spent = self.machine.spent_by(self.name, work) + (FIRST_NS if rested and self.name == "cpu" else 0)
        completion = FakeMark(self.machine, ready, start, start + spent + EACH_NS[self.name])
        self.free_ns = completion.end_ns
        if self.inline:
            completion.wait()
        if done is not None:
            done()
        return completion


@dataclass
class FakeMachine:
    """Lanes of ``HAND_OVER_NS``; kernels call ``spend``, and the host ``work``."""

    result_path: str = "direct"
    kind: str = "host-lanes"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clock_ns: int = 1_000_000

    def __post_init__(self) -> None:
        self.gpu, self.cpu, self.back = (FakeLane(self, name) for name in ("gpu", "cpu", "back"))
        self.d2h, self.link = FakeLane(self, "d2h", inline=True), FakeLane(self, "link")
        self._here = threading.local()  # the lane whose work a thread does, and what that has spent

    def now_ns(self) -> int:
        return self.clock_ns

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    gpu_tensor = host_tensor

    def readable(self, host: Tensor) -> Tensor:
        return host

    def hosting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_copying(self) -> None: ...

    def poll(self) -> None: ...

    def copy_in(self, target: Tensor, source: Tensor) -> FakeMark:
        return self.link.submit(lambda: target.copy_(source))

    def spend(self, ns: int) -> None:
        """Called by work on a lane: it takes so much longer."""
        self._here.ns += ns

    @property
    def at_work(self) -> str:
        """The lane whose work is being done."""
        return str(self._here.lane)

    def work(self, ns: int) -> None:
        """The host does something."""
        self.clock_ns += ns

    def spent_by(self, lane: str, work: Work) -> int:
        self._here.lane, self._here.ns = lane, 0
        work()
        return int(self._here.ns)


@dataclass(frozen=True)
class FakeKernel(SwiGlu):
    """An expert of n tokens takes the GPU 100 + 10 n, the CPU 1000 + 50 n."""

    machine: Any = None

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        base, each = {"gpu": (100, 10), "cpu": (1000, 50)}[self.machine.at_work]
        self.machine.spend(base + each * len(gate_up))
        return super()._apply_gate(gate_up)


@dataclass
class FakeModel:
    """A ``ReplayModel`` that computes nothing; n: tokens of the step, or sequences where it says so."""

    machine: FakeMachine
    top_k: int
    new: tuple[int, ...] = (1,)
    earlier: tuple[int, ...] = (0,)

    def begin_step(self, tokens: tuple[int, ...], context: tuple[int, ...]) -> None:
        self.new, self.earlier = tokens, context

    def attention(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """1000 a sequence, and 1 for every key of every sequence; 2 for those of a prefill."""
        keys = sum(self.new) + sum(self.earlier)
        self.machine.spend(1000 * len(self.new) + keys * (1 if max(self.new) == 1 else 2))
        return hidden, hidden

    def gate(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor]:
        self.machine.spend(20 + len(normed))
        return torch.zeros(len(normed), self.top_k, dtype=torch.int64), torch.ones(len(normed), self.top_k)

    def speculate(self, layer: int, normed: Tensor) -> None:
        self.machine.spend(21 + len(normed))

    def estimate(self, layer: int, normed: Tensor) -> None:
        self.machine.spend(22 + len(normed))

    def shared(self, layer: int, normed: Tensor) -> None:
        self.machine.spend(23 + len(normed))

    def dense_ffn(self, normed: Tensor) -> None:
        self.machine.spend(24 + len(normed))

    def dense(self, hidden: Tensor) -> None:
        self.machine.spend(2000)

    def combine(self, parts: Tensor, top_k: int, shared: Tensor | None, residual: Tensor) -> Tensor:
        self.machine.spend(30 + len(residual))
        return residual

    def head(self, hidden: Tensor) -> None:
        self.machine.spend(400 + len(self.new))
