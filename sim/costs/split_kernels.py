"""What a layer's experts take that stay with the CPU, in a model whose other weights are on a GPU (``--n-cpu-moe``).

Measured on one machine by ``trilane profile --engine llama.cpp --gpu``. CPU kernels have other rates here than on a
machine without a GPU: llama.cpp keeps such experts in the file's own order of rows, so that they can be copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

from sim.costs.kernels import ByThreads, Listed, ProductRates
from trilane.common.hints import ASCENDING, NOT_EMPTY, Count, between
from trilane.machines.sourced import Sourced

_Ns = Annotated[float, between(0, 1e9)]


class ExpertCopies(NamedTuple):
    """Copies of experts to the GPU, for large pieces of a prompt: of each expert, and of each of its bytes."""

    expert_ns: Sourced[_Ns]
    byte_ns: Sourced[_Ns]

    def ns(self, size: int) -> float:
        """The time of an expert of ``size`` bytes."""
        return self.expert_ns.value + size * self.byte_ns.value


class SplitKernels(NamedTuple):
    """Times of a layer of experts on the CPU, for every number of its ``threads`` that was measured.

    ``layer_ns``: to hand over and back, with both waiting; ``chosen_ns``: of an element of a chosen expert's output,
    apart from its products. Experts are copied from a ``mapped`` file, or from ``pinned`` memory (``--load-mode
    none``).
    """

    threads: Annotated[tuple[Count, ...], NOT_EMPTY, ASCENDING]
    experts: Mapping[str, Sourced[ProductRates]]  # by block
    chosen_ns: Sourced[ByThreads]
    layer_ns: Sourced[ByThreads]
    mapped: ExpertCopies
    pinned: ExpertCopies

    def lists(self) -> Iterator[Listed]:
        """Every number that has a value for each number of threads."""
        threads = len(self.threads)
        for block, rate in self.experts.items():
            yield f"experts.{block}", rate.value.flops_per_s, (threads, len(rate.value.rows))
        yield from ((name, getattr(self, name).value, (threads,)) for name in ("chosen_ns", "layer_ns"))

    def place(self, threads: int) -> int:
        """Where the values for so many threads stand: those of the next smaller number, if it was not measured."""
        return max(bisect_right(self.threads, threads) - 1, 0)
