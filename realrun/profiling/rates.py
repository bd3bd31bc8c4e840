"""Achieved bandwidths compared with plain copies and plain reads; they are printed, but not used in simulations."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from realrun.machine.lanes import Completion, took_ns
from realrun.profiling.hardware import LEAST_NS, LinkFigures
from realrun.profiling.lab import Lab
from sim.machine.profile import MeasuredModel

REPEATS = 7
SMALL = 1 << 12  # bytes: a copy that is all latency
SIZES = (1 << 16, 1 << 20, 1 << 24)
COPY_AIM, READ_AIM = 0.9, 0.8


class Aim(NamedTuple):
    """A share of the rate of plain copies or reads, and the share that is aimed at."""

    what: str
    share: float
    wanted: float

    @property
    def met(self) -> bool:
        """Whether it was reached."""
        return self.share >= self.wanted


def plain_rates(lab: Lab) -> tuple[LinkFigures, dict[str, float]]:
    """Plain copies and reads on the lab's machine, while the copy thread is idle, and bytes per second by size."""
    host, device = lab.memory.view(-1), lab.arena.view(-1)
    large = len(host) // 4
    with ThreadPoolExecutor(1, initializer=lab.machine.begin_copying) as link:

        def copy_ns(source: Tensor) -> float:
            return _middle(lambda: link.submit(_plain_copy, lab, device[: len(source)], source).result())

        h2d_ns, latency_ns = copy_ns(host[:large]), copy_ns(host[:SMALL])
        pageable_ns = copy_ns(torch.zeros(large, dtype=torch.uint8)) if lab.machine.kind == "cuda" else h2d_ns
        by_size = {f"copy_of_{size}_bytes_per_s": size / copy_ns(host[:size]) * 1e9 for size in SIZES if size <= large}
    words = host.view(torch.int64)
    read_bytes_per_s = words.nbytes / _middle(lambda: lab.machine.cpu.submit(words.sum)) * 1e9  # all experts' memory
    figures = LinkFigures(
        h2d_bytes_per_s=large / h2d_ns * 1e9, h2d_latency_ns=_latency(latency_ns),
        d2h_bytes_per_s=large / _back_ns(lab, large) * 1e9, d2h_latency_ns=_latency(_back_ns(lab, SMALL)),
        pageable_fraction=min(1.0, h2d_ns / pageable_ns), memory_read_bytes_per_s=read_bytes_per_s,
    )
    return figures, by_size


def achieved(name: str, model: MeasuredModel, link: LinkFigures) -> tuple[dict[str, float], list[Aim]]:
    """The share of plain bandwidths that the model's experts reach."""
    size = model.sizes.expert_bytes
    copied, read = size / model.copy.ns * 1e9, size / model.expert_cpu.ns[0] * 1e9
    aims = [
        Aim(f"{name}: expert copies / plain copies", copied / link.h2d_bytes_per_s, COPY_AIM),
        Aim(f"{name}: a CPU expert of 1 token / plain reading", read / link.memory_read_bytes_per_s, READ_AIM),
    ]
    rates = {"expert_copy_bytes_per_s": copied, "cpu_expert_read_bytes_per_s": read}
    return {f"{name}, {key}": rate for key, rate in rates.items()}, aims


def _plain_copy(lab: Lab, target: Tensor, source: Tensor) -> Completion:
    """A copy in one piece, if the machine can do that."""
    with torch.inference_mode():
        if lab.machine.kind == "cuda":
            return lab.machine.link.submit(lambda: target.copy_(source, non_blocking=True))
        return lab.machine.copy_in(target, source)


def _back_ns(lab: Lab, size: int) -> float:
    target, source = lab.memory.view(-1)[:size], lab.arena.view(-1)[:size]  # both hold the same weights
    return _middle(lambda: lab.machine.back.submit(lambda: target.copy_(source, non_blocking=True)))


def _middle(copy: Callable[[], Completion]) -> float:
    """Median ns, after a first one to warm up."""
    times = [took_ns(copy()) for _ in range(REPEATS + 1)]
    return max(median(times[1:]), 1)


def _latency(ns: float) -> int:
    return max(round(ns), LEAST_NS)
