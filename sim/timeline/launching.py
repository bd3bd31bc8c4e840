"""Launching: the host starts the kernels of a group one after another, and the GPU works on those that it has.

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

from functools import cache
from typing import NamedTuple

from sim.costs.cost_table import CostTable
from sim.timeline.lanes import Lane


class Launch(NamedTuple):
    """When the GPU can start on a group of kernels, and when the host has launched all of it."""

    first_ns: int
    end_ns: int

    def after(self, ready_ns: int) -> Launch:
        """The same launch of work that also waits for something else."""
        return Launch(max(self.first_ns, ready_ns), self.end_ns)

    def until(self, end_ns: int) -> Launch:
        """A part of the group, launched by then."""
        return Launch(self.first_ns, end_ns)


class Launching:
    """Launches on ``host`` what runs on ``gpu``."""

    def __init__(self, host: Lane, gpu: Lane, costs: CostTable) -> None:
        self._host, self._take = host, gpu.reserve
        self._lead_of, self._tail_of = cache(costs.lead_of), cache(costs.tail_of)

    def launch(self, ready: int, launch_ns: int, layer: int, expert: int = -1) -> Launch:
        """Launch a group from the first moment at or after ``ready`` at which the host is free."""
        end = self._host.reserve(ready, launch_ns, "launch", layer, expert)
        return Launch(end - launch_ns + self._lead_of(launch_ns), end)

    def run(
        self, launch: Launch, gpu_ns: int, kind: str, layer: int, expert: int = -1, tokens: int = 0,
        size_bytes: int = 0, target_layer: int = -1,
    ) -> int:
        """Take the GPU for work of ``gpu_ns`` that is launched so; return its end."""
        first_ns, end_ns = launch
        until = end_ns + self._tail_of(gpu_ns)
        return self._take(first_ns, gpu_ns, kind, layer, expert, tokens, size_bytes, target_layer, until)
