"""The smoke test of a machine: checks of lanes, clocks, memory and link, and then of generation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from statistics import median

import torch

from realrun.machine.lanes import Completion, Machine, nothing, took_ns
from realrun.machine.machines import RealMachine
from realrun.smoke import Check, SkippedError, checked, expect

# Chosen: copies of about 10 ms, in which start and end hardly count, and enough page-locked memory for a rate within
# about a second.
COPIED_BYTES = {"cuda": 1 << 28, "host-lanes": 1 << 26}
PINNED_BYTES = {"cuda": 1 << 31, "host-lanes": 1 << 28}
TURNS = 5
CLOCKS_NS = 5000  # the most by which a GPU's times may be late: see ``GpuClock``
CPU_WAITS_S = 1.0  # at most, for the host to submit what needs the CPU's result


def smoke(made: Callable[[bool], RealMachine]) -> Iterator[Check]:
    """Yield every check when it is done; ``made(inline)`` creates the machine, see ``machine_for``.

    Raises RefusedError if there is no such machine. The second half needs transformers.
    """
    with closing(made(False)) as machine:
        yield from machine_checks(machine)
    from realrun.smoke.generation_checks import generation_checks  # the import takes seconds

    with closing(made(True)) as machine:
        yield from generation_checks(machine)


def machine_checks(machine: Machine) -> Iterator[Check]:
    """Yield every check when it is done."""
    yield checked("streams: work waits for the copy that it needs", partial(_streams, machine))
    yield checked("events: times are in order, on the host's clock", partial(_events, machine))
    yield checked("flags: a stream waits for the CPU, the host does not", partial(_flags, machine))
    yield checked("zero-copy: the GPU reads what the CPU wrote", partial(_zero_copy, machine))
    yield checked("host memory: allocated for copies", partial(_pinning, machine))
    yield checked("link: host to GPU", partial(_host_to_gpu, machine))
    yield checked("link: GPU to host", partial(_gpu_to_host, machine))


def _streams(machine: Machine) -> str:
    size = COPIED_BYTES[machine.kind] // 4
    source, slot = machine.host_tensor((size,), torch.uint8), machine.gpu_tensor((size,), torch.uint8)
    seen = machine.gpu_tensor((size,), torch.uint8)
    with ThreadPoolExecutor(1, initializer=machine.begin_copying) as link:
        for turn in range(1, TURNS + 1):
            source.fill_(turn)
            copy = link.submit(machine.copy_in, slot, source).result()
            machine.gpu.submit(lambda: seen.copy_(slot), (copy,)).wait()
            machine.settle()
            values = sorted(set(seen[:: max(1, size // 1000)].tolist()))
            expect(values == [turn], f"expected the GPU to read {turn} everywhere, got {values}")
    return f"{TURNS} copies of {size / 1e6:.0f} MB, each read whole"


def _events(machine: Machine) -> str:
    waits = []
    for _ in range(20 * TURNS):
        before_ns = machine.now_ns()
        completion = machine.gpu.submit(nothing)
        completion.wait()
        after_ns = machine.now_ns()
        ns = [before_ns, completion.ready_ns, completion.start_ns, completion.end_ns, after_ns + CLOCKS_NS]
        expect(ns == sorted(ns), f"expected ascending times before, ready, start, end, after (ns), got {ns}")
        waits.append(after_ns - before_ns)
    return f"{median(waits) / 1e3:.1f} us from submitting empty work to the end of waiting for it"


def _flags(machine: Machine) -> str:
    result, seen = machine.host_tensor((8,), torch.float32), machine.gpu_tensor((8,), torch.float32)
    came = machine.gpu_tensor((8,), torch.float32)

    submitted = threading.Event()

    def compute() -> None:
        submitted.wait(CPU_WAITS_S)
        result.fill_(3.0)

    on_cpu = machine.cpu.submit(compute)
    began_ns = machine.now_ns()
    completion = machine.gpu.submit(lambda: seen.copy_(result, non_blocking=True), (on_cpu,))
    took_ns, was_held = machine.now_ns() - began_ns, on_cpu.has_ended()
    submitted.set()
    completion.wait()
    machine.gpu.submit(lambda: came.copy_(seen)).wait()
    machine.settle()
    expect(came.tolist() == [3.0] * 8, f"expected the CPU's result on the GPU, 3 everywhere, got {came.tolist()}")
    if was_held:
        raise SkippedError("the host waits for CPU experts instead of the stream: layers with such experts are slower")
    return f"launched in {took_ns / 1e3:.0f} us, before the CPU's result was ready"


def _zero_copy(machine: Machine) -> str:
    if machine.result_path != "direct":
        raise SkippedError("the CPU's results are copied over the link (result_path h2d)")
    host = machine.host_tensor((2048,), torch.bfloat16)
    view, seen = machine.readable(host), machine.gpu_tensor((2048,), torch.bfloat16)
    for turn in range(1, TURNS + 1):
        host.fill_(turn)
        machine.gpu.submit(lambda: torch.add(view, 0, out=seen)).wait()
        machine.settle()
        values = sorted(set(seen.tolist()))
        expect(values == [turn], f"expected {turn} everywhere, got {values}")
    return f"{TURNS} times, each time the latest values"


def _pinning(machine: Machine) -> str:
    size, began_s = PINNED_BYTES[machine.kind], time.perf_counter()
    machine.host_tensor((size,), torch.uint8)
    seconds = max(1e-9, time.perf_counter() - began_s)
    kind = "page-locked" if machine.kind == "cuda" else "ordinary"
    return f"{size / seconds / 1e9:.2f} GB/s ({size / 1e9:.2f} GB, {kind})"


def _host_to_gpu(machine: Machine) -> str:
    size = COPIED_BYTES[machine.kind]
    source = machine.host_tensor((size,), torch.uint8)
    target = machine.gpu_tensor((size,), torch.uint8)
    with ThreadPoolExecutor(1, initializer=machine.begin_copying) as link:
        return _rate(size, lambda: link.submit(machine.copy_in, target, source).result())


def _gpu_to_host(machine: Machine) -> str:
    size = COPIED_BYTES[machine.kind]
    source, target = machine.gpu_tensor((size,), torch.uint8), machine.host_tensor((size,), torch.uint8)
    return _rate(size, lambda: machine.back.submit(lambda: target.copy_(source, non_blocking=True)))


def _rate(size: int, copy: Callable[[], Completion]) -> str:
    """The rate of the median copy, by its own times; the first copy is discarded."""
    times_ns = [took_ns(copy()) for _ in range(1 + TURNS)]
    middle_ns = median(times_ns[1:])
    expect(middle_ns > 0, f"expected that copying {size} bytes takes time, got {middle_ns} ns")
    return f"{size / middle_ns:.2f} GB/s ({size / 1e6:.0f} MB at a time)"
