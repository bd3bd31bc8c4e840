"""The CPU lane: experts one after another, each on all threads, slowed down while copies read the same DRAM."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import simpy

from policies.views import ExpertCosts
from sim.engine.lanes import SharedMemory
from sim.engine.spans import Recorder


class CpuJob(NamedTuple):
    """One expert's work: ready when its activations have arrived; ``target`` is the layer whose result it is."""

    ready: int
    work_ns: int
    kind: str
    layer: int
    target: int
    expert: int
    tokens: int


class CpuLane:
    """Serves jobs in order; ``ended(target, expert)`` is called at the end of each."""

    def __init__(
        self, env: simpy.Environment, memory: SharedMemory, recorder: Recorder, costs: Sequence[ExpertCosts],
        ended: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self._env, self._memory, self._recorder, self._costs, self._ended = env, memory, recorder, costs, ended
        self._jobs: deque[CpuJob] = deque()
        self._running: CpuJob | None = None
        self._start = 0

    def add(
        self, experts: Sequence[int], workload: dict[int, int], ready: int, kind: str, layer: int, target: int
    ) -> None:
        """Queue one batch of experts in order; the first of a batch pays the first-expert penalty."""
        costs = self._costs[target]
        penalty = costs.first_cpu_ns
        for expert in experts:
            tokens = workload[expert]
            self._jobs.append(CpuJob(ready, costs.cpu_ns[tokens] + penalty, kind, layer, target, expert, tokens))
            penalty = 0
        if self._running is None:
            self._wait_for(ready)

    def left_ns(self) -> int:
        """Work queued and running, in ns without contention for what has not started."""
        if self._running is None and not self._jobs:
            return 0
        return self._memory.left_ns(SharedMemory.CPU) + sum(job.work_ns for job in self._jobs)

    def _wait_for(self, ready: int) -> None:
        if ready > self._env.now:
            self._env.timeout(ready - self._env.now).callbacks.append(self._serve)
        else:
            self._serve()

    def _serve(self, _: simpy.Event | None = None) -> None:
        if self._running is not None or not self._jobs:
            return
        if self._jobs[0].ready > self._env.now:
            self._wait_for(self._jobs[0].ready)
            return
        self._running = self._jobs.popleft()
        self._start = int(self._env.now)
        self._memory.start(SharedMemory.CPU, self._running.work_ns, self._over)

    def _over(self) -> None:
        job, recorder = self._running, self._recorder
        assert job is not None
        self._running = None
        recorder.rows.append(
            ("cpu", job.ready, self._start, int(self._env.now), job.kind, recorder.phase, recorder.step, job.layer,
             job.target if job.target != job.layer else -1, job.expert, job.tokens, self._costs[job.target].bytes)
        )  # fmt: skip
        self._serve()
        self._ended(job.target, job.expert)
