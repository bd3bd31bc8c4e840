"""The GPU lane: the host starts the kernels of a group one after another, and the GPU works on those that it has.

The one rule, for every span of the GPU whose kernels the host launches from ``begin`` to ``end``:

- it starts no earlier than ``begin`` + lead: when the first kernel of its group can run;
- it ends no earlier than ``end`` + tail: when the last kernel has been launched, and has run.

So it lasts its own time where the GPU is the slower of the two, and as long as its launches where the host is. Where
one launch is for several spans (attention, gate, forecasts and shared experts of a layer) they follow one another from
the group's lead on, and each has an ``end`` of its own: when the host comes to the kernels of the next one. (A forecast
is launched with the gate, in no time.) A lead is never longer than the launch, and a tail never longer than the span's
own time: a launch that takes no time changes nothing, and one that is all lead is followed by the span's whole time.

While the GPU waits for the next kernel of a span it counts as busy, as between the two events that time a span on a
real machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.mechanism.views import INFINITE_NS
from sim.costs.cost_table import CostTable
from sim.runs.spans import SpanRecorder
from sim.timeline.lanes import Lane, Neighbour


class GpuLane:
    """The GPU, whose work is launched on the lane ``host``.

    Neighbours are lanes with which it shares memory or cores. A span is made longer by what it overlaps with what they
    have been given when it is reserved, or when a layer is planned while it lasts (``slow_down``). What a neighbour has
    yet to do is taken to last as long as without slowing.
    """

    __slots__ = ("_costs", "_host", "_last", "_lead_ns", "_tail_ns", "free_ns", "name", "neighbours", "recorder")

    def __init__(
        self, host: Lane, costs: CostTable, neighbours: Sequence[Neighbour] = (), recorder: SpanRecorder | None = None
    ) -> None:
        self.name, self.recorder, self.neighbours = "gpu", recorder or host.recorder, neighbours
        self._host, self._costs = host, costs
        self._lead_ns = INFINITE_NS if costs.lead_ns is None else costs.lead_ns
        self._tail_ns = costs.tail_ns
        self.free_ns = 0
        self._last = -1, 0, 0  # row of the last span, when it started, and how long it takes by itself

    def launch(self, ready_ns: int, launch_ns: int, layer: int, expert: int = -1) -> tuple[int, int]:
        """Launch a group of kernels from the first moment at or after ``ready_ns`` at which the host is free.

        Returns when the GPU can start on it, and when the host has launched all of it, in ns.
        """
        end_ns, lead_ns = self._host.reserve(ready_ns, launch_ns, "launch", layer, expert), self._lead_ns
        return end_ns - launch_ns + (lead_ns if lead_ns < launch_ns else launch_ns), end_ns

    def run(
        self, first_ns: int, launched_ns: int, gpu_ns: int, kind: str, layer: int, expert: int = -1, tokens: int = 0,
        size_bytes: int = 0, target_layer: int = -1,
    ) -> int:
        """Take the GPU for work of ``gpu_ns`` that it can start on at ``first_ns`` and that has been launched at
        ``launched_ns``; return the end in ns."""
        recorder, start_ns = self.recorder, self.free_ns
        if first_ns > start_ns:
            start_ns = first_ns
        end_ns = start_ns + gpu_ns
        if self.neighbours:
            self._last = len(recorder.rows), start_ns, gpu_ns
            end_ns = start_ns + self._slowed(gpu_ns, start_ns)
        tail_ns = self._tail_ns
        least_ns = launched_ns + (tail_ns if tail_ns < gpu_ns else gpu_ns)
        if least_ns > end_ns:
            end_ns = least_ns
        self.free_ns = end_ns
        recorder.rows.append(
            ("gpu", first_ns, start_ns, end_ns, kind, recorder.phase, recorder.step, layer, target_layer, expert,
             tokens, size_bytes)
        )
        return end_ns

    def fetch(self, start_ns: int, end_ns: int, layer: int, expert: int, size_bytes: int) -> None:
        """Record that the GPU, having nothing else to do, has copied an expert itself."""
        recorder = self.recorder
        recorder.rows.append(
            ("gpu", start_ns, start_ns, end_ns, "fetch", recorder.phase, recorder.step, layer, -1, expert, 0,
             size_bytes)
        )
        self._last = len(recorder.rows) - 1, end_ns, 0  # nothing slows it down
        self.free_ns = end_ns

    def run_group(self, ready_ns: int, layer: int, experts: Sequence[int], workload: Mapping[int, int]) -> list[int]:
        """``launch`` and ``run`` experts of a layer one after another, which share kernels of the first; return their
        ends in ns.

        (The arithmetic of both in one loop: half of a run's spans are made here.)
        """
        if not experts:
            return []
        host, recorder, lead_ns, tail_ns = self._host, self.recorder, self._lead_ns, self._tail_ns
        rows, phase, step, ends_ns = recorder.rows, recorder.phase, recorder.step, list[int]()
        launched_ns, end_ns = max(host.free_ns, ready_ns), self.free_ns
        costs, later_launch_ns = self._costs.experts[layer], self._costs.expert_launch_ns
        launch_ns, first_gpu_ns = later_launch_ns + self._costs.first_expert_launch_ns, costs.first_gpu_ns
        own = costs
        for expert in experts:
            if costs.narrow is not None:
                own = costs.of(expert)
            tokens, begin_ns = workload[expert], launched_ns
            gpu_ns = own.gpu_ns[tokens] + first_gpu_ns
            launched_ns += launch_ns
            rows.append(("host", ready_ns, begin_ns, launched_ns, "launch", phase, step, layer, -1, expert, 0, 0))
            first_ns = begin_ns + (lead_ns if lead_ns < launch_ns else launch_ns)
            start_ns = first_ns if first_ns > end_ns else end_ns
            end_ns = start_ns + gpu_ns
            if self.neighbours:
                self._last = len(rows), start_ns, gpu_ns
                end_ns = start_ns + self._slowed(gpu_ns, start_ns)
            least_ns = launched_ns + (tail_ns if tail_ns < gpu_ns else gpu_ns)
            if least_ns > end_ns:
                end_ns = least_ns
            rows.append(
                ("gpu", first_ns, start_ns, end_ns, "expert", phase, step, layer, -1, expert, tokens, own.expert_bytes)
            )
            ends_ns.append(end_ns)
            launch_ns, first_gpu_ns = later_launch_ns, 0
        host.free_ns, self.free_ns = launched_ns, end_ns
        return ends_ns

    def slow_down(self, now_ns: int) -> None:
        """Neighbours may have been given work since the last span was reserved: time what is left of it anew.

        That span is mostly of shared experts, during which a layer is planned, its copies and CPU experts begin. A
        forecast stays as it is: its copy to the host has been reserved.
        """
        place, start_ns, own_ns = self._last
        if self.recorder.rows[place][4] == "speculate":
            return
        begin_ns = max(now_ns, start_ns)
        left_ns = self.free_ns - begin_ns
        if left_ns > 0:
            end_ns = begin_ns + self._slowed(own_ns * left_ns // (self.free_ns - start_ns), begin_ns)
            self.free_ns = max(self.free_ns, end_ns)
            row = self.recorder.rows[place]
            self.recorder.rows[place] = (*row[:3], self.free_ns, *row[4:])

    def _slowed(self, duration_ns: int, start_ns: int) -> int:
        for neighbour in self.neighbours:
            duration_ns = neighbour.slowed(duration_ns, start_ns)
        return duration_ns
