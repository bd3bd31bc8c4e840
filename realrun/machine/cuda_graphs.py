"""CUDA graphs: work of a stream that is recorded once and then launched by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from realrun.errors import RefusedError

T = TypeVar("T")


class CudaGraphs:
    """Records graphs on the current stream. ``recorded``: their number.

    Graphs of one kind share memory, which torch allows if they never run at the same time and do not read each other's
    output (https://github.com/pytorch/pytorch/pull/166975). So a graph reads memory that was allocated outside, and its
    output must be read before another graph of its kind is replayed.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self._pools: dict[str, Any] = {}

    def record(self, kind: str, work: Callable[[], T]) -> Callable[[], T]:
        """Run ``work`` once, since libraries allocate and initialise on first use, and then record it.

        What is returned launches the graph on the current stream, which writes the output of ``work`` (tensors, or
        tuples of them) again at the same place, and returns it.

        ``work`` must neither wait for the device nor read host memory. Other threads use other streams at the same
        time and poll their events, at which a recording in CUDA's "global" mode would fail
        (https://github.com/pytorch/pytorch/pull/104555). Raises RefusedError if CUDA cannot record it.
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

        def replay() -> T:
            graph.replay()
            return output

        return replay
