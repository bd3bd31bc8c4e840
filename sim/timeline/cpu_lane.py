"""The CPU lane: experts one after another, each on all threads, slower while copies read the same DRAM.

On a machine whose GPU is a core of the same processor, they are also slower while that core computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import simpy

from policies.mechanism.shared_dram import rates_together
from policies.mechanism.views import ExpertCosts
from sim.runs.spans import SpanRecorder
from sim.timeline.lanes import Neighbour, SharedMemory

# By kind of batch: how far ahead of the layer at work are the layer of its experts, and the one that adds the results.
_AHEAD = {"expert": (0, 0), "precompute": (1, 1), "deferred": (0, 1)}


class CpuBatch(NamedTuple):
    """Experts of the layer ``target``, ready when the activations of ``layer`` have arrived; the output of the layer
    ``joins`` adds their results."""

    ready: int
    kind: str
    layer: int
    target: int
    joins: int
    experts: Sequence[int]
    tokens: list[int]
    works_ns: list[int]


class CpuLane:
    """Serves batches in order; ``ended(joins)`` is called at the end of each."""

    def __init__(
        self, env: simpy.Environment, memory: SharedMemory, recorder: SpanRecorder, costs: Sequence[ExpertCosts],
        gpu: Neighbour, ended: Callable[[int], None],
    ) -> None:
        self._gpu = gpu
        self._env, self._memory, self._recorder, self._costs, self._ended = env, memory, recorder, costs, ended
        self._batches: deque[CpuBatch] = deque()
        self._running: CpuBatch | None = None
        self._series: deque[tuple[tuple[int, int], list[int]]] = deque()  # its experts that have not begun, by rates
        self._start = 0
        self._ends: list[int] = []  # of the running batch

    def add(
        self, kind: str, experts: Sequence[int], workload: dict[int, int], ready: int, layer: int, follows: bool = False
    ) -> None:
        """Queue one batch of experts in order, one at least, while ``layer`` is at work. The first of them takes
        ``first_cpu_ns`` longer, unless the batch ``follows`` another one of its layer."""
        target, joins = (layer + ahead for ahead in _AHEAD[kind])
        tokens = [workload[expert] for expert in experts]
        works_ns = self.works_ns(tokens, target)
        if follows:
            works_ns[0] -= self._costs[target].first_cpu_ns
        self._batches.append(CpuBatch(ready, kind, layer, target, joins, experts, tokens, works_ns))
        if self._running is None:
            self._wait_for(ready)

    def works_ns(self, tokens: Sequence[int], target: int) -> list[int]:
        """What experts of layer ``target`` take one after another, each alone."""
        costs = self._costs[target]
        works_ns = [costs.cpu_ns[count] for count in tokens]
        works_ns[0] += costs.first_cpu_ns
        return works_ns

    def until_ns(self) -> int:
        """When all that is queued and running will have ended, without contention for what has not started."""
        until = int(self._env.now) + self._running_ns()
        for batch in self._batches:
            until = max(until, batch.ready) + sum(batch.works_ns)
        return until

    def left_ns(self) -> int:
        """Work queued and running, in ns without contention for what has not started."""
        return self._running_ns() + sum(sum(batch.works_ns) for batch in self._batches)

    def _running_ns(self) -> int:
        return self._memory.left_ns(SharedMemory.CPU) + sum(sum(works_ns) for _, works_ns in self._series)

    def _wait_for(self, ready: int) -> None:
        if ready > self._env.now:
            self._env.timeout(ready - self._env.now).callbacks.append(self._serve)
        else:
            self._serve()

    def _serve(self, _: simpy.Event | None = None) -> None:
        if self._running is not None or not self._batches:
            return
        if self._batches[0].ready > self._env.now:
            self._wait_for(self._batches[0].ready)
            return
        self._running = batch = self._batches.popleft()
        self._start, self._ends = int(self._env.now), []
        works_ns = self._slowed(batch.works_ns) if self._gpu.permille < 1000 else batch.works_ns
        self._series.extend(self._by_rates(batch, works_ns))
        self._go_on([])

    def _by_rates(self, batch: CpuBatch, works_ns: Sequence[int]) -> list[tuple[tuple[int, int], list[int]]]:
        """The works of a batch in order, those with equal rates next to copies together."""
        costs = self._costs[batch.target]
        rates = {count: rates_together(costs, costs.cpu_ns[count], costs.cpu_ns[1]) for count in set(batch.tokens)}
        pairs = groupby(zip(map(rates.__getitem__, batch.tokens), works_ns, strict=True), key=itemgetter(0))
        return [(together, [work_ns for _, work_ns in equal]) for together, equal in pairs]

    def _go_on(self, ends: list[int]) -> None:
        """Begin the next experts of the batch after those that ended at ``ends``."""
        self._ends += ends
        if self._series:
            together, works_ns = self._series.popleft()
            self._memory.start(SharedMemory.CPU, works_ns, self._go_on, together)
        else:
            self._over()

    def _slowed(self, works_ns: Sequence[int]) -> list[int]:
        """The same works, longer by what they overlap with work that the GPU has been given."""
        slowed, start = [], self._start
        for work_ns in works_ns:
            slowed.append(self._gpu.slowed(work_ns, start))
            start += slowed[-1]
        return slowed

    def _over(self) -> None:
        batch, recorder, ends = self._running, self._recorder, self._ends
        assert batch is not None
        self._running = None
        ready, kind, layer, target, joins, experts, counts, _ = batch
        phase, step, size_bytes = recorder.phase, recorder.step, self._costs[target].expert_bytes
        ahead = target if target != layer else -1
        starts = [self._start, *ends[:-1]]
        recorder.rows.extend(
            [("cpu", ready, start, end, kind, phase, step, layer, ahead, expert, tokens, size_bytes)
             for start, end, expert, tokens in zip(starts, ends, experts, counts, strict=True)]
        )
        self._serve()
        self._ended(joins)
