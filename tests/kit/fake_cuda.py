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
from torch.utils._python_dispatch import _disable_current_modes

QUERY_NS = 1000  # of the host


class FakeGraph:
    """Captured work; ``made``: tensors in the memory of its ``pool``."""

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

    def __init__(self, cuda: FakeCuda, device: int = 0) -> None:
        self.cuda, self.device, self.name = cuda, device, cuda.name_of_stream(device)
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


GB = 10**9
IDLE_GHZ, BOOST_GHZ = 0.345, 1.98  # of an H200's processors


class FakeCuda:
    """``drift``: by how much the GPU's clock runs fast. ``delays_ns``: how late the next ``synchronize`` returns."""

    def __init__(self, drift: float = 0.0) -> None:
        self.drift = drift
        self.now_ns = 1_000_000  # of the host
        self.delays_ns: deque[int] = deque()
        self.streams: list[FakeStream] = []
        self.names: dict[int, Iterator[str]] = {}
        self.current_device: dict[int, int] = {}  # by thread
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

    def name_of_stream(self, device: int) -> str:
        """The streams of a device in the order in which the lanes make them; those of device 1 are clock1, gpu1 ..."""
        names = self.names.setdefault(device, iter(("clock", "gpu", "d2h", "back", "link")))
        return f"{next(names, 'another')}{device or ''}"

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
        """Do the device's work until ``reached``, as every kind of synchronising does."""
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
        """Capture as ``torch.cuda.graph``; ``pool``: the graphs that share memory."""
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
        """The tensor that torch makes of an address on a GPU."""
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
