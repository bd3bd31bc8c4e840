"""HybriMoE's scheduling by simulation (Section IV-B): the assignment follows from simulating three timelines.

The GPU runs cached experts, the busiest first; the CPU runs absent ones, the idlest first, and when none are left
may take cached ones, again the idlest first; the link copies absent ones, the busiest first. The next operation is
always that of the earliest timeline. The GPU's begins when it has run the kernels that a layer's experts share. All
times are integer nanoseconds.

Times depend on workloads alone, so the simulation represents an expert by its tokens. Experts stand in descending order
(equal workloads: the lower id first): the GPU and the link take from the front, the CPU from the back. What the CPU and
the link divide among themselves does not depend on the GPU, so it is settled first; the GPU need only be followed step
by step if the CPU might take some of its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertCosts, LayerView
from policies.parts.assigners import by_tokens

Rule = Literal["finish", "device_free"]
_MOST_KNOWN = 4096  # simulated layers
Coming = tuple[int, int]  # when an expert is on the GPU, its tokens


class SimulatedLayer(NamedTuple):
    """How a simulated layer ends: the first ``loaded`` absent experts go over the link, the last ``stolen`` cached ones
    to the CPU."""

    makespan_ns: int
    loaded: int
    stolen: int


class Schedule:
    """The simulation, in its readings.

    ``rule``: the paper's "earliest completion time" is that of the operation which would finish earliest ("finish"), or
    that of the device which is free earliest ("device_free"). Ties go to GPU, CPU, link in this order.

    ``guard`` (ours): a load is timed with the GPU's computation (by the rule "device_free", it is made only if done
    before the CPU would have finished all that is absent); the CPU takes a cached expert only if it finishes no later
    than the GPU's queue would; the GPU takes the busiest expert that has arrived (at equal workload, cached ones
    before loaded ones), else the first to arrive. Without it loads are timed by the copy alone, the CPU takes any
    cached expert, and the GPU waits for its busiest expert. In every variant the CPU takes only experts that were
    cached when the layer was routed: a copy in flight cannot be withdrawn.
    """

    def __init__(self, rule: Rule = "finish", guard: bool = True) -> None:
        self.rule = rule
        self.guard = guard
        self._costs: dict[int, ExpertCosts] = {}  # by identity: they hold long tables, and layers share them
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}

    def makespan_ns(self, costs: ExpertCosts, cached: Sequence[int], absent: Sequence[int]) -> int:
        """The makespan of ``play`` on idle lanes: simulated once, as layers of a decode are much the same."""
        key = id(self._costs.setdefault(id(costs), costs)), tuple(cached), tuple(absent)
        known_ns = self._known.get(key)
        if known_ns is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known_ns = self._known[key] = self.play(costs, cached, absent).makespan_ns
        return known_ns

    def play(
        self, costs: ExpertCosts, cached: Sequence[int], absent: Sequence[int], coming: Sequence[Coming] = (),
        link_ns: int = 0, cpu_ns: int = 0,
    ) -> SimulatedLayer:
        """Simulate a layer whose ``cached`` and ``absent`` experts have these workloads, both descending.

        ``coming`` are being copied already, and there by ``link_ns``. Link and CPU are busy until ``link_ns`` and
        ``cpu_ns``.
        """
        divide = self._by_finish if self.rule == "finish" else self._by_clock
        loaded, busy_ns, last_ns = divide(costs, absent, link_ns, cpu_ns)
        first_ns = costs.first_cpu_ns if loaded == len(absent) else 0
        copy_ns, gpu_ns, start_ns = costs.copy_ns, costs.gpu_ns, costs.first_gpu_ns
        arrivals = [(link_ns + copy_ns * (place + 1), tokens) for place, tokens in enumerate(absent[:loaded])]
        if self.guard:
            gpu_end = _finish(gpu_ns, start_ns, cached, sorted([*coming, *arrivals]) if coming else arrivals)
            if not cached or busy_ns + first_ns + costs.cpu_ns[cached[-1]] > gpu_end:
                return SimulatedLayer(gpu_end if gpu_end > busy_ns else busy_ns, loaded, 0)
        gpu = _Gpu(gpu_ns, start_ns, cached, coming, self)
        for arrival in arrivals:
            gpu.advance(self._load_key(costs, arrival))
            gpu.coming.append(arrival)
        gpu.advance(last_ns)
        stolen, busy_ns = self._steal(costs, gpu, busy_ns, first_ns)
        gpu.advance(INFINITE_NS)
        return SimulatedLayer(max(gpu.now, busy_ns), loaded, stolen)

    def _by_finish(self, costs: ExpertCosts, absent: Sequence[int], link: int, cpu: int) -> tuple[int, int, int]:
        """CPU and link, the earlier finish first: (experts loaded, end of the CPU, key of the last operation)."""
        cpu_ns, copy_ns, first = costs.cpu_ns, costs.copy_ns, costs.first_cpu_ns
        gpu_ns = costs.gpu_ns if self.guard else [0] * len(costs.gpu_ns)
        front, back, last = 0, len(absent), -1
        while front < back:
            loaded = link + copy_ns + gpu_ns[absent[front]]
            while front < back and (last := cpu + first + cpu_ns[absent[back - 1]]) <= loaded:
                cpu, first = last, 0
                back -= 1
            if front < back:
                link, last = link + copy_ns, loaded
                front += 1
        return front, cpu, last

    def _by_clock(self, costs: ExpertCosts, absent: Sequence[int], link: int, cpu: int) -> tuple[int, int, int]:
        """Schedule with the device first that is free earlier."""
        cpu_ns, copy_ns, first = costs.cpu_ns, costs.copy_ns, costs.first_cpu_ns
        rest = sum(cpu_ns[tokens] for tokens in absent)
        front, back, last = 0, len(absent), -1
        while front < back:
            loaded = link + copy_ns + costs.gpu_ns[absent[front]]
            if cpu <= link or (self.guard and loaded > cpu + first + rest):
                last, tokens = cpu, absent[back - 1]
                cpu, first = cpu + first + cpu_ns[tokens], 0
                back -= 1
            else:
                last, tokens = link, absent[front]
                link += copy_ns
                front += 1
            rest -= cpu_ns[tokens]
        return front, cpu, last

    def _load_key(self, costs: ExpertCosts, arrival: Coming) -> int:
        """The time by which a load was compared with the other timelines."""
        here, tokens = arrival
        if self.rule == "device_free":
            return here - costs.copy_ns
        return here + costs.gpu_ns[tokens] if self.guard else here

    def _steal(self, costs: ExpertCosts, gpu: _Gpu, busy_ns: int, first_ns: int) -> tuple[int, int]:
        """No absent experts left: GPU and CPU compete for the cached. Returns how many the CPU takes, and its end."""
        stolen = 0
        while gpu.cached:
            end = busy_ns + first_ns + costs.cpu_ns[gpu.cached[0]]
            if self.guard and end > gpu.finish():
                break
            gpu.advance(end if self.rule == "finish" else busy_ns)
            if gpu.cached:
                del gpu.cached[0]
                stolen, busy_ns, first_ns = stolen + 1, end, 0
        return stolen, busy_ns


class _Gpu:
    """The GPU's timeline: its clock, and the experts that wait for it (``cached`` workloads ascending)."""

    def __init__(
        self, gpu_ns: Sequence[int], now: int, cached: Sequence[int], coming: Sequence[Coming], rules: Schedule
    ) -> None:
        self.now = now
        self.cached = list(reversed(cached))
        self.coming = list(coming)
        self._gpu_ns = gpu_ns
        self._by_finish, self._waits = rules.rule == "finish", not rules.guard

    def advance(self, until: int) -> None:
        """Run whatever comes before ``until``, by its end or, where the free device comes first, by its start."""
        while self.cached or self.coming:
            chosen = self._next()
            here, tokens = (0, self.cached[-1]) if chosen is None else chosen
            start = max(self.now, here)
            end = start + self._gpu_ns[tokens]
            if (end if self._by_finish else start) > until:
                return
            self.now = end
            if chosen is None:
                self.cached.pop()
            else:
                self.coming.remove(chosen)

    def _next(self) -> Coming | None:
        """The next expert: one of ``coming``, or None for the busiest cached one."""
        ready = self.coming if self._waits else [expert for expert in self.coming if expert[0] <= self.now]
        best = max(ready, key=lambda expert: (expert[1], -expert[0]), default=None)
        if self.cached:
            return best if best is not None and best[1] > self.cached[-1] else None
        return best or min(self.coming)

    def finish(self) -> int:
        """When all waiting experts are finished."""
        return _finish(self._gpu_ns, self.now, self.cached, sorted(self.coming))


def _finish(gpu_ns: Sequence[int], now: int, cached: Sequence[int], arrivals: Sequence[Coming]) -> int:
    """When a GPU that waits only for arrivals has finished all of these; ``arrivals`` in order of time."""
    for tokens in cached:
        now += gpu_ns[tokens]
    for here, tokens in arrivals:
        now = (now if now > here else here) + gpu_ns[tokens]
    return now


class SimulationAssigner:
    """Section IV-B as an assigner: the layer runs as it was simulated.

    Copies in flight are awaited, and the link is free when the running copy has ended.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def assign(self, view: LayerView) -> Assignment:
        """Simulate the layer."""
        active, tokens, ready = view.routing.active, view.routing.tokens, view.ready_ns
        cached: list[int] = []
        coming: list[int] = []
        absent: list[int] = []
        for i in by_tokens(tokens):
            transfer = ready[active[i]]
            (absent if transfer == INFINITE_NS else coming if transfer else cached).append(i)
        makespan_ns, loaded, stolen = self.schedule.play(
            view.costs[view.layer], [tokens[i] for i in cached], [tokens[i] for i in absent],
            [(ready[active[i]], tokens[i]) for i in coming], view.h2d_backlog_ns, view.cpu_backlog_ns,
        )
        kept = len(cached) - stolen
        coming.sort(key=lambda i: ready[active[i]])
        loads = tuple(active[i] for i in absent[:loaded])
        gpu = (*(active[i] for i in (*cached[:kept], *coming)), *loads)
        cpu = tuple(active[i] for i in (*reversed(absent[loaded:]), *reversed(cached[kept:])))
        return Assignment(gpu, cpu, loads, makespan_ns)
