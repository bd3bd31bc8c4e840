"""Search for the number of threads that compute an expert fastest, if it can be chosen."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import median

import torch

from realrun.experts.ffn import ExpertShape, weighted_ffn
from realrun.experts.store import random_store
from realrun.machine.cores import alone, most_cpu_threads
from realrun.machine.host_memory import check_host_memory
from realrun.machine.lanes import MachineLane, took_ns
from realrun.machine.machines import RealMachine
from realrun.machine.pinned import plain
from realrun.machine.thread_lane import ThreadLane, low_jitter, settle_thread
from realrun.profiling.lab import EXPERTS_BYTES
from traces.models.shape import ModelShape

TOKENS = (1, 8, 64)
REPEATS = 9
SPUN_BYTES = 1 << 20  # at once: about a millisecond without the interpreter lock, from the core's own cache
Expert = dict[str, torch.Tensor]


def with_best_threads(machine: RealMachine, shape: ModelShape) -> tuple[RealMachine, dict[str, float]]:
    """The machine with the number of CPU threads that compute an expert of one token fastest, and all measured times.

    They are measured while the cores of the host thread and the copy thread spin, as in a run, and leave both a
    physical core. Host lanes have fixed cores and are returned as they are; a CUDA machine is replaced by a new one.
    """
    if machine.kind == "host-lanes":
        return machine, {}
    from realrun.machine.cuda_lanes import CudaLanes, CudaSettings

    assert isinstance(machine.settings, CudaSettings)
    cores, busy = machine.settings.cpu_cores, (machine.settings.host_core, machine.settings.copy_core)
    times = thread_times(shape, counts_up_to(most_cpu_threads(cores)), cores, busy)
    best = min((ns, threads) for (threads, tokens), ns in times.items() if tokens == 1)[1]
    machine.close()
    name = shape.base_name
    rates = {f"{name}, cpu_expert_ns, {count} threads, {tokens} tokens": ns for (count, tokens), ns in times.items()}
    return CudaLanes(replace(machine.settings, cpu_threads=best)), rates


def counts_up_to(most: int) -> list[int]:
    """Powers of 2, some numbers in between, and ``most``."""
    return sorted({count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if count <= most} | {most})


def thread_times(
    shape: ModelShape, counts: Sequence[int], cores: Sequence[int] | None, busy: Sequence[int | None]
) -> dict[tuple[int, int], float]:
    """Median ns of one expert by (threads, tokens), in ordinary memory; counts in turn, so that noise affects all.

    ``busy``: cores on which a thread spins at the same time (None: on any core).
    """
    experts = _experts(shape)
    lanes = {count: ThreadLane(f"cpu of {count}", cores, count) for count in counts}
    samples: dict[tuple[int, int], list[float]] = {(count, tokens): [] for count in counts for tokens in TOKENS}
    with low_jitter(), spinning(busy):
        for _ in range(REPEATS):
            for count, tokens in samples:
                samples[count, tokens].append(_expert_ns(lanes[count], shape, experts, tokens))
    for lane in lanes.values():
        lane.close()
    return {key: median(times[1:]) for key, times in samples.items()}


@contextmanager
def spinning(cores: Sequence[int | None]) -> Iterator[None]:
    """In the block, one thread spins for every core of ``cores`` (None: any)."""
    ended = threading.Event()
    threads = [threading.Thread(target=_spin, args=(core, ended), name="spinning", daemon=True) for core in cores]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _spin(core: int | None, ended: threading.Event) -> None:
    """Spin like a thread that waits for the GPU: hashlib releases the interpreter lock (docs.python.org, hashlib)."""
    settle_thread(alone(core), 1)
    block = bytes(SPUN_BYTES)
    while not ended.is_set():
        hashlib.sha256(block)


def _experts(shape: ModelShape) -> Iterator[Expert]:
    """Experts in turn, from more memory than caches hold."""
    layout = ExpertShape.of(shape).layout
    many = min(shape.experts * shape.moe_layers, max(2, -(-EXPERTS_BYTES // layout.size_bytes)))
    check_host_memory(layout.size_bytes * many)
    store = random_store(layout, 1, many, plain)
    return cycle([layout.views(store.buffer(0, expert)) for expert in range(many)])


def _expert_ns(lane: MachineLane, shape: ModelShape, experts: Iterator[Expert], tokens: int) -> int:
    """The time of one expert, after another one that wakes the threads."""
    dtype, _, kernel = ExpertShape.of(shape)
    hidden, choices, weights = torch.ones(tokens, shape.hidden, dtype=dtype), torch.arange(tokens), torch.ones(tokens)
    given = (hidden, choices, weights, 1, torch.empty(tokens, shape.hidden))
    first, second = (partial(weighted_ffn, kernel, next(experts), *given) for _ in range(2))
    lane.submit(first)
    return took_ns(lane.submit(second))
