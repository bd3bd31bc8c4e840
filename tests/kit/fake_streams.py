"""Streams, events, flags and graphs of the GPU for tests; see ``tests.kit.fake_cuda``."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from tests.kit.fake_cuda import FakeCuda

QUERY_NS = 1000  # of the host


class FakeGraph:
    """What was captured; ``made``: tensors in the memory of its ``pool``."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.work: list[Callable[[int], None]] = []
        self.takes_ns = 0
        self.made: list[torch.Tensor] = []
        self.pool: list[FakeGraph] = []

    def replay(self) -> None:
        stream = self.cuda.current[threading.get_ident()]
        self.cuda.log.append(("do", stream.name, "graph"))
        stream.put(self._do, self.takes_ns)

    def _do(self, now_ns: int) -> None:
        for other in self.pool:
            for tensor in other.made:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        for work in self.work:
            work(now_ns)


class FakeStream:
    """``op_ns``: how long each operation takes."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.name = cuda, next(cuda.names, "another")
        self.cuda_stream = len(cuda.streams)  # the handle that the driver knows it by
        self.queue: deque[tuple[int, FakeEvent | FakeFlag | None, Callable[[int], None], int]] = deque()
        self.now_ns, self.op_ns = 0, 1000
        self.captured: FakeGraph | None = None
        cuda.streams.append(self)

    def put(self, do: Callable[[int], None], takes_ns: int = 0, gate: FakeEvent | FakeFlag | None = None) -> None:
        if self.captured is not None:
            self.captured.work.append(do)
            self.captured.takes_ns += takes_ns
            return
        with self.cuda.lock:
            self.queue.append((self.cuda.now_ns, gate, do, takes_ns))

    def ends_ns(self) -> int | None:
        """When the head of the queue ends; None if it waits for what has not happened."""
        given_ns, gate, _, takes_ns = self.queue[0]
        if gate is not None and gate.at_ns is None:
            return None
        return max(self.now_ns, given_ns, (gate and gate.at_ns) or 0) + takes_ns

    def do(self) -> None:
        self.now_ns = self.ends_ns() or 0
        _, _, do, takes_ns = self.queue.popleft()
        self.cuda.busy_ns += takes_ns
        with _disable_current_modes(), torch.inference_mode():
            do(self.now_ns)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(("wait", self.name, str(event.of)))
        if event.is_recorded:
            self.put(lambda now: None, gate=event)

    def synchronize(self) -> None:
        if self.captured is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.cuda.run_until(lambda: not self.queue)
        self.cuda.returned(self.now_ns)


class FakeFlag:
    """A wait until the word at ``address`` has reached ``value``; ``at_ns``: when it was seen to have, or None."""

    def __init__(self, cuda: FakeCuda, address: int, value: int) -> None:
        self._cuda, self._value = cuda, value
        self._word = ctypes.c_uint32.from_address(address)
        self._seen_ns: int | None = None
        _ = self.at_ns  # it may be reached already

    @property
    def at_ns(self) -> int | None:
        if self._seen_ns is None and ctypes.c_int32(self._word.value - self._value).value >= 0:
            self._seen_ns = self._cuda.now_ns
        return self._seen_ns


class FakeEvent:
    def __init__(self, cuda: FakeCuda, enable_timing: bool) -> None:
        self.cuda, self.enable_timing = cuda, enable_timing
        self.is_recorded = False
        self.at_ns: int | None = None
        self.of: str | None = None

    def record(self, stream: FakeStream) -> None:
        self.is_recorded, self.of = True, stream.name
        self.cuda.log.append(("record", stream.name))
        stream.put(self._happen)

    def query(self) -> bool:
        if not self.is_recorded:
            return True
        self.cuda.run_to(self.cuda.now_ns)
        with self.cuda.lock:
            has_happened = self.at_ns is not None and self.at_ns <= self.cuda.now_ns
            self.cuda.now_ns += QUERY_NS
        return has_happened

    def synchronize(self) -> None:
        if self.is_recorded:
            self.cuda.run_until(lambda: self.at_ns is not None)
            self.cuda.returned(self.at_ns or 0)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.enable_timing
        assert later.enable_timing
        assert self.at_ns is not None, "both events must have happened"
        assert later.at_ns is not None, "both events must have happened"
        return float(np.float32((later.at_ns - self.at_ns) * (1 + self.cuda.drift) / 1e6))

    def _happen(self, now_ns: int) -> None:
        self.at_ns = now_ns
