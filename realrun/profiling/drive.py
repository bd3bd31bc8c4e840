"""The numbers of a disk (``sim.machine.devices.Drive``), from reads of a file of experts, one read at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import inf
from statistics import median

import torch

from policies.mechanism.views import ExpertId
from realrun.errors import RefusedError
from realrun.experts.expert_file import BLOCK_BYTES, ExpertFile, aligned
from sim.machine.devices import Drive

LEAST_LATENCY_NS, MOST_BYTES_PER_S = 1e3, 1e11  # of a plausible disk, as in ``sim.machine.plausibility``


def drive_of(file: ExpertFile, reads: int = 24, name: str = "as measured") -> Drive:
    """The disk of a file, by medians of so many reads of each kind: a block, an expert in one request, and an expert in
    the requests of runs. Raises what ``drive_from`` raises."""
    times = timed_reads(file, reads)
    return drive_from(times, file.stride, file.request_bytes, file.depth, name)


def timed_reads(file: ExpertFile, reads: int) -> Mapping[str, float]:
    """Median times in ns of reads of a "block", a "whole" expert in one request, and one in "requests", in turn."""
    target = aligned(file.stride, lambda size: torch.zeros(size, dtype=torch.uint8))
    kinds = {"block": (BLOCK_BYTES, BLOCK_BYTES), "whole": (file.stride, file.stride), "requests": (file.stride, None)}
    took: dict[str, list[int]] = {kind: [] for kind in kinds}
    experts, count = file.experts, file.experts * len(file.layouts)
    for number in range(reads):
        for place, (kind, (size, request_bytes)) in enumerate(kinds.items()):
            layer, expert = divmod((7 * (3 * number + place)) % count, experts)  # neighbours are not read in turn
            began_ns = time.perf_counter_ns()
            file.read(ExpertId(layer, expert), target[:size], request_bytes)
            took[kind].append(time.perf_counter_ns() - began_ns)
    return {kind: median(ns) for kind, ns in took.items()}


def drive_from(times: Mapping[str, float], size: int, request_bytes: int, depth: int, name: str) -> Drive:
    """The disk on which reads of ``size`` bytes take ``times``: its ceiling is that with which ``rate_of_reads`` gives
    the rate of those in requests. Raises RefusedError for times that do not show a number of it."""
    if size <= BLOCK_BYTES or times["whole"] <= times["block"]:
        raise RefusedError(
            f"disk {name}: expected a read of {size} bytes to take longer than one of {BLOCK_BYTES}, measured "
            f"{times['whole']:.0f} and {times['block']:.0f} ns: measure larger experts, or on a quieter machine"
        )
    alone = (size - BLOCK_BYTES) / (times["whole"] - times["block"]) * 1e9
    latency_ns = times["block"] - BLOCK_BYTES / alone * 1e9
    if latency_ns < LEAST_LATENCY_NS:
        raise RefusedError(
            f"disk {name}: expected a read of {BLOCK_BYTES} bytes to take 1 us and its bytes' share of one of {size}, "
            f"measured {times['block']:.0f} and {times['whole']:.0f} ns: use a folder on a disk, not in memory, or "
            "measure on a quieter machine"
        )
    rate, request = size / times["requests"], min(request_bytes, size)  # bytes per ns
    one = latency_ns / request + 1e9 / alone  # ns per byte of a request that is alone
    if rate * one <= 1 or depth == 1:
        ceiling = rate
    else:
        rest = 1 / rate - one / depth
        ceiling = (1 - 1 / depth) / rest if rest > 0 else inf
    if ceiling * 1e9 > MOST_BYTES_PER_S:
        raise RefusedError(
            f"disk {name}: expected {depth} requests at once to be held up by each other, measured {rate:.2f} GB/s, "
            f"which is {rate * one:.1f} times one alone, so that the ceiling stays unknown: measure with more at once"
        )
    return Drive(name, latency_ns, alone, ceiling * 1e9, request_bytes, depth)
