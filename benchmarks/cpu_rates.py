"""Bytes of weights that are read in a second, by several ways in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from statistics import median

import torch
from torch import Tensor

from realrun.experts.ffn import SwiGlu, weighted_ffn
from realrun.experts.store import ExpertLayout, random_store
from realrun.machine.pinned import plain

BYTES = 690_000_000  # of all experts, more than caches hold
Rates = Mapping[str, list[float]]  # GB/s by round
Work = Callable[[Tensor], object]  # with an expert's buffer


def experts(layout: ExpertLayout) -> Iterator[Tensor]:
    """Buffers of random experts, over and over."""
    count = BYTES // layout.size_bytes
    store = random_store(layout, 1, count, plain)
    return cycle([store.buffer(0, expert) for expert in range(count)])


def expert_work(kernel: SwiGlu, layout: ExpertLayout, tokens: int) -> Work:
    """One expert with ``tokens`` rows."""
    hidden = layout.parts[1].shape[0]  # rows of down_proj
    x, choices, weights = torch.randn(tokens, hidden).bfloat16(), torch.arange(tokens), torch.rand(tokens)
    out = torch.empty(tokens, hidden)
    return lambda buffer: weighted_ffn(kernel, layout.views(buffer), x, choices, weights, 1, out)


def rates(
    works: Mapping[str, Work], buffers: Iterator[Tensor], rounds: int, meet: Callable[[], object] = lambda: None
) -> Rates:
    """Each work's by the thread's CPU time, next to ``reading`` by torch.sum; all take turns within a round.
    ``meet`` is called before each.
    """
    every: dict[str, Work] = {"reading": lambda buffer: buffer.view(torch.int64).sum(), **works}
    found: dict[str, list[float]] = {name: [] for name in every}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for name, work in every.items():
                buffer = next(buffers)
                meet()
                begin = time.thread_time_ns()
                work(buffer)
                found[name].append(len(buffer) / max(1, time.thread_time_ns() - begin))
    return {name: each[1:] for name, each in found.items()}


def ratio(found: Rates, one: str, other: str) -> float:
    """The median of ratios within a round."""
    return median(mine / its for mine, its in zip(found[one], found[other], strict=True))
