"""A GPU for tests: the device behind the parts of ``torch.cuda`` that the CUDA machine uses, on virtual time.

Streams are queues of deferred work. The device always does next what ends first, so data change in the order of the
virtual clock, and work that forgets to wait reads old data. Time passes only while a thread synchronises, and by
``QUERY_NS`` with each query. As on a real GPU, waiting for an event that was never recorded is no waiting, a stream
that waits for a flag continues only after a thread has set it, times are float32, and processors are idle at low clock
rates, which rise after some work. A stream that is captured does nothing, and cannot be waited for; a replay does what
was captured on the present content of memory, and spoils all that other graphs of its pool have written.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tests.kit.fake_streams import FakeFlag, FakeGraph, FakeStream

GB = 10**9
IDLE_GHZ, BOOST_GHZ = 0.345, 1.98  # of an H200's processors


class FakeCuda:
    """``drift``: by how much the GPU's clock runs fast. ``delays_ns``: how late the next ``synchronize`` returns."""

    def __init__(self, drift: float = 0.0) -> None:
        self.drift = drift
        self.now_ns = 1_000_000  # of the host
        self.delays_ns: deque[int] = deque()
        self.streams: list[FakeStream] = []
        self.names = iter(("clock", "gpu", "d2h", "back", "link"))
        self.log: list[tuple[str, ...]] = []
        self.error: RuntimeError | None = None
        self.fraction = 1.0
        self.free_bytes, self.total_bytes, self.devices = 80 * GB, 100 * GB, 2
        self.l2_bytes = 50_000_000
        self.busy_ns, self.rises_after_ns = 0, 0  # work done, and how much of it raises the clocks
        self.current: dict[int, Any] = {}  # stream by thread
        self.lock = threading.Condition(threading.RLock())
        self.is_held = False
        self.registered: dict[int, int] = {}  # bytes by address
        self.maps_pinned_memory = True
        self.has_flags, self.flag_code = True, 0  # can the driver wait for one, and what it answers when asked to
        self.cached: dict[int, torch.Tensor] | None = None  # what kernels have read, if they never look again

    def stream(self, name: str) -> FakeStream:
        return next(stream for stream in self.streams if stream.name == name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The device stands still; whoever synchronises waits."""
        self.is_held = True
        yield
        self.release()

    def release(self) -> None:
        """The device goes on."""
        with self.lock:
            self.is_held = False
            self.lock.notify_all()

    def run_until(self, reached: Callable[[], bool]) -> None:
        """What every kind of synchronising does."""
        with self.lock:
            self.lock.wait_for(lambda: not self.is_held)
            if self.error is not None:
                raise self.error
            while not reached():
                if not self._do_next():
                    self._wait_for_flag()
            self.lock.notify_all()

    def returned(self, at_ns: int) -> None:
        """The host learns of something that happened at ``at_ns``."""
        with self.lock:
            self.now_ns = max(self.now_ns, at_ns) + (self.delays_ns.popleft() if self.delays_ns else 0)

    def sleep(self, cycles: int) -> None:
        """A kernel that counts cycles."""
        risen = self.busy_ns >= self.rises_after_ns
        self.current[threading.get_ident()].put(lambda now: None, round(cycles / (BOOST_GHZ if risen else IDLE_GHZ)))

    @contextmanager
    def capture(
        self, graph: FakeGraph, pool: list[FakeGraph], stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        """What ``torch.cuda.graph`` does; ``pool``: the graphs that share memory."""
        assert capture_error_mode == "thread_local", "other threads poll events meanwhile"
        assert stream is self.current[threading.get_ident()]
        graph.pool = pool
        pool.append(graph)
        for each in self.streams:
            each.synchronize()
        stream.captured = graph
        try:
            yield
        finally:
            stream.captured = None

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        """What torch makes of an address on a GPU."""
        known = self.registered.items()
        if not any(start <= address and address + size <= start + length for start, length in known):
            raise RuntimeError(
                "The specified pointer resides on host memory and is not registered with any CUDA device"
            )
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))

    def run_to(self, until_ns: int) -> None:
        """All that ends by then, if the device is not held."""
        with self.lock:
            while not self.is_held and self.error is None and self._do_next(until_ns):
                pass
            self.lock.notify_all()

    def wait_value(self, handle: int, address: int, value: int, flags: int) -> int:
        """``cuStreamWaitValue32``."""
        assert flags == 0
        self.log.append(("flag", self.streams[handle].name, str(value)))
        if self.flag_code == 0:
            self.streams[handle].put(lambda now: None, gate=FakeFlag(self, address, value))
        return self.flag_code

    def _do_next(self, until_ns: float = math.inf) -> bool:
        ends = [(end, stream) for stream in self.streams if stream.queue and (end := stream.ends_ns()) is not None]
        end, stream = min(ends, key=lambda pair: pair[0], default=(math.inf, None))
        if stream is None or end > until_ns:
            return False
        stream.do()
        return True

    def _wait_for_flag(self) -> None:
        """Nothing can run before a thread, which is no part of the device, has set a flag that a stream waits for."""
        heads = {stream.name: stream.queue[0][1] for stream in self.streams if stream.queue}
        assert any(isinstance(gate, FakeFlag) for gate in heads.values()), f"deadlock: {list(heads)} wait"
        self.lock.wait(0.001)  # meanwhile that thread may use the device
