"""The CPU lane: experts one after another, each on all threads, slower while copies read the same DRAM.

In a *pool* of threads a batch has two phases: all of its experts' first products (gate and up), a barrier, and then all
of their second ones (down). The span of an expert is that of the second, which gives its result, with all its bytes.

On a machine whose GPU is a core of the same processor, they are also slower while that core computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import simpy

from policies.mechanism.shared_dram import rates_together
from policies.mechanism.views import ExpertCosts
from sim.runs.spans import SpanRecorder
from sim.timeline.clock import Clock, Moment
from sim.timeline.lanes import Neighbour, Rates, SharedMemory

# By kind of batch: how far ahead of the layer at work are the layer of its experts, and the one that adds the results.
_AHEAD = {"expert": (0, 0), "precompute": (1, 1), "deferred": (0, 1)}


class CpuBatch(NamedTuple):
    """Experts of the layer ``target``, ready when the activations of ``layer`` have arrived; the output of the layer
    ``joins`` adds their results."""

    ready_ns: int
    kind: str
    layer: int
    target: int
    joins: int
    experts: Sequence[int]
    tokens: list[int]
    works_ns: list[int]


class Phases(NamedTuple):
    """A pool's phases: permille of an expert's time before the barrier, time at the barrier, unit of time (in ns)."""

    permille: int
    barrier_ns: int
    unit_ns: int

    def split(self, works_ns: Sequence[int], first_ns: int) -> list[int]:
        """The first parts of all works, then the second ones. The first work has ``first_ns`` more than its own; of
        these the barrier comes before its second part."""
        own_ns = [works_ns[0] - first_ns, *works_ns[1:]]
        before = [work_ns // self.unit_ns * self.permille // 1000 * self.unit_ns for work_ns in own_ns]
        after = [work_ns - part_ns for work_ns, part_ns in zip(own_ns, before, strict=True)]
        barrier_ns = min(self.barrier_ns, first_ns)
        before[0] += first_ns - barrier_ns
        after[0] += barrier_ns
        return [*before, *after]


class CpuLane:
    """Serves batches in order; ``ended(batch)`` is called at the end of each."""

    def __init__(
        self, clock: Clock, memory: SharedMemory, recorder: SpanRecorder, costs: Sequence[ExpertCosts],
        gpu: Neighbour, ended: Callable[[CpuBatch], None], phases: Phases | None = None,
    ) -> None:
        self._gpu, self._phases = gpu, phases
        self._clock, self._memory, self._recorder, self._costs, self._ended = clock, memory, recorder, costs, ended
        self._batches: deque[CpuBatch] = deque()
        self._running: CpuBatch | None = None
        self._series: deque[tuple[Rates, list[int]]] = deque()  # its experts that have not begun, by rates
        self._start_ns = 0
        self._ends_ns: list[int] = []  # of the running batch
        self._rates_of = cache(self._rates)

    def add(
        self, kind: str, experts: Sequence[int], workload: dict[int, int], ready_ns: int, layer: int,
        follows: bool = False,
    ) -> None:
        """Queue one batch of experts in order, one at least, while ``layer`` is at work. The first of them takes
        ``first_cpu_ns`` longer, unless the batch ``follows`` another one of its layer."""
        target_ahead, joins_ahead = _AHEAD[kind]
        target = layer + target_ahead
        tokens = [workload[expert] for expert in experts]
        works_ns = self.works_ns(tokens, target)
        if follows:
            works_ns[0] -= self._costs[target].first_cpu_ns
        if self._phases is not None:
            works_ns = self._phases.split(works_ns, 0 if follows else self._costs[target].first_cpu_ns)
        self._batches.append(CpuBatch(ready_ns, kind, layer, target, layer + joins_ahead, experts, tokens, works_ns))
        if self._running is None:
            self._wait_for(ready_ns)

    def works_ns(self, tokens: Sequence[int], target: int) -> list[int]:
        """Times in ns of experts of layer ``target`` one after another, without contention."""
        costs = self._costs[target]
        works_ns = list(map(costs.cpu_ns.__getitem__, tokens))
        works_ns[0] += costs.first_cpu_ns
        return works_ns

    def until_ns(self) -> int:
        """End in ns of all that is queued and running, without contention for what has not started."""
        until_ns = self._clock.now + self._running_ns()
        for batch in self._batches:
            until_ns = max(until_ns, batch.ready_ns) + sum(batch.works_ns)
        return until_ns

    def remaining_ns(self) -> int:
        """Work queued and running, in ns without contention for what has not started."""
        if self._running is None and not self._batches:
            return 0
        return self._running_ns() + sum(sum(batch.works_ns) for batch in self._batches)

    def _running_ns(self) -> int:
        return self._memory.remaining_ns(SharedMemory.CPU) + sum(sum(works_ns) for _, works_ns in self._series)

    def _wait_for(self, ready_ns: int) -> None:
        if ready_ns > self._clock.now:
            Moment(self._clock, ready_ns, None, self._serve)
        else:
            self._serve()

    def _serve(self, _: simpy.Event | None = None) -> None:
        if self._running is not None or not self._batches:
            return
        now_ns = self._clock.now
        if self._batches[0].ready_ns > now_ns:
            self._wait_for(self._batches[0].ready_ns)
            return
        self._running = batch = self._batches.popleft()
        self._start_ns, self._ends_ns = now_ns, []
        works_ns = self._slowed(batch.works_ns) if self._gpu.permille < 1000 else batch.works_ns
        self._split_by_rates(batch, works_ns)
        self._go_on([])

    def _split_by_rates(self, batch: CpuBatch, works_ns: Sequence[int]) -> None:
        """Line up the works of a batch in order, those with equal rates next to copies together."""
        last: Rates | None = None
        counts = batch.tokens if self._phases is None else batch.tokens * 2
        for tokens, work_ns in zip(counts, works_ns, strict=True):
            together = self._rates_of(batch.target, tokens)
            if together == last:
                self._series[-1][1].append(work_ns)
            else:
                self._series.append((together, [work_ns]))
                last = together

    def _rates(self, target: int, tokens: int) -> Rates:
        """Rates in permille of an expert of layer ``target`` and of a copy, while both run; of each link."""
        of_links = [costs[target] for costs in self._memory.links or (self._costs,)]
        return tuple(rates_together(costs, costs.cpu_ns[tokens], costs.cpu_ns[1]) for costs in of_links)

    def _go_on(self, ends_ns: list[int]) -> None:
        """Begin the next experts of the batch after those that ended at ``ends_ns``."""
        self._ends_ns += ends_ns
        if self._series:
            together, works_ns = self._series.popleft()
            self._memory.start(SharedMemory.CPU, works_ns, self._go_on, together)
        else:
            self._end()

    def _slowed(self, works_ns: Sequence[int]) -> list[int]:
        """Lengthen works by what they overlap with work that the GPU has been given."""
        slowed_ns, start_ns = [], self._start_ns
        for work_ns in works_ns:
            slowed_ns.append(self._gpu.slowed(work_ns, start_ns))
            start_ns += slowed_ns[-1]
        return slowed_ns

    def _end(self) -> None:
        batch, recorder, ends_ns = self._running, self._recorder, self._ends_ns
        assert batch is not None
        self._running = None
        ready_ns, kind, layer, target, _, experts, counts, _ = batch
        phase, step, size_bytes = recorder.phase, recorder.step, self._costs[target].expert_bytes
        ahead = target if target != layer else -1
        starts_ns = [self._start_ns, *ends_ns[:-1]]
        if self._phases is not None:
            half = len(experts)
            spans = zip(starts_ns[:half], ends_ns[:half], experts, counts, strict=True)
            recorder.rows.extend(
                [("cpu", ready_ns, start_ns, end_ns, "gate_up", phase, step, layer, ahead, expert, tokens, 0)
                 for start_ns, end_ns, expert, tokens in spans]
            )
            starts_ns, ends_ns = starts_ns[half:], ends_ns[half:]
        recorder.rows.extend(
            [("cpu", ready_ns, start_ns, end_ns, kind, phase, step, layer, ahead, expert, tokens, size_bytes)
             for start_ns, end_ns, expert, tokens in zip(starts_ns, ends_ns, experts, counts, strict=True)]
        )
        self._serve()
        self._ended(batch)
