"""CUDA graphs: work of a stream that is recorded once, and then launched by one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from realrun.errors import RefusedError

T = TypeVar("T")


@dataclass(frozen=True)
class Recorded(Generic[T]):
    """``output``: tensors, or tuples of them, that every replay fills anew."""

    graph: torch.cuda.CUDAGraph
    output: T

    def replay(self) -> T:
        """Launch it on the current stream."""
        self.graph.replay()
        return self.output


class CudaGraphs:
    """Records on the current stream. ``recorded``: how many graphs there are.

    Graphs of one kind share memory, which torch allows where they never run at the same time and do not read each
    other's output (https://github.com/pytorch/pytorch/pull/166975). So a graph reads memory that was made outside, and
    its output must have been read before another graph of its kind is replayed.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self._pools: dict[str, Any] = {}

    def record(self, kind: str, work: Callable[[], T]) -> Recorded[T]:
        """Do ``work`` once, since libraries allocate and initialise the first time, and record it without doing it.

        ``work`` neither waits for the device nor takes anything from the host. Other threads use other streams
        meanwhile, and poll their events; a recording in CUDA's "global" mode would fail at that
        (https://github.com/pytorch/pytorch/pull/104555). Raises RefusedError where CUDA does not record it.
        """
        work()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        pool = self._pools.setdefault(kind, torch.cuda.graph_pool_handle())
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                output = work()
        except RuntimeError as error:
            raise RefusedError(f"cuda: could not record {kind} as a graph: {error}; use runtime=eager") from error
        self.recorded += 1
        return Recorded(graph, output)
