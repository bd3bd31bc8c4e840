"""The lower bound of copies and CPU experts: what no cache of a size can serve.

Let u be the start of an expert's run in one layer event, and u' in its next one. If no copy of it started in
(u, u'] and the later run is on the GPU, it was in memory all of that time: the run is a *hit*. (For its first event,
u is the start of the window.) All other runs are on the CPU or can be charged with a copy of their own within the
window. When an event is planned, every hit that spans this moment holds a slot, and there are C of them (capacity /
smallest expert). So hits form a set of intervals of which at most C overlap at any event, and keeping, event by event,
those that end first (Belady with bypass, from the best possible start) gives the most of them. Of the requests that
are left, n on the CPU take at least the n shortest CPU times, between synchronisation and combine, so in addition to
all other links of the chain; the rest take one copy each on the serial link. The least over n of the longer of the two
bounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from sim.costs.cost_table import CostTable
from sim.runs.demand import StepDemand


def traffic_ns(steps: Sequence[StepDemand], costs: CostTable, capacity_bytes: int, fixed_ns: int) -> int:
    """The least time of misses, over all ``steps``; ``fixed_ns``: of their chain without experts."""
    layers = range(len(costs.experts))
    events = [[layer << 20 | e for e in step.routings[layer].active] for step in steps for layer in layers]
    misses = least_misses(events, capacity_bytes // min(expert.expert_bytes for expert in costs.experts))
    tables = [expert.cpu_ns for expert in costs.experts]
    cpu = np.sort([tables[layer][w] for step in steps for layer in layers for w in step.routings[layer].tokens])
    on_cpu = np.concatenate([[0], np.cumsum(cpu[:misses])]) + fixed_ns
    on_link = np.arange(misses, -1, -1) * min(expert.copy_ns for expert in costs.experts)
    return int(np.maximum(on_cpu, on_link).min())


def least_misses(events: Sequence[Sequence[int]], capacity: int) -> int:
    """Requests that no cache of ``capacity`` equal slots can serve, whatever it holds at the start.

    Each event asks for several experts together, in any order; a miss need not be kept.
    """
    following = _next_uses(events)
    held: set[int] = set()
    furthest: list[tuple[int, int]] = []  # (-next use, expert); those used already sink to the bottom
    misses = 0

    def keep(uses: Mapping[int, int]) -> None:
        held.update(uses)
        for expert, use in uses.items():
            heapq.heappush(furthest, (-use, expert))
        while len(held) > capacity:
            held.remove(heapq.heappop(furthest)[1])

    keep(following[-1])
    for event, uses in zip(events, following, strict=False):
        hits = held.intersection(event)
        misses += len(event) - len(hits)
        held -= hits
        keep(uses)
    return misses


def _next_uses(events: Sequence[Sequence[int]]) -> list[dict[int, int]]:
    """For each event, when its experts are next used, if ever; last, the first use of every expert."""
    coming: dict[int, int] = {}
    following = []
    for place in range(len(events) - 1, -1, -1):
        following.append({expert: coming[expert] for expert in events[place] if expert in coming})
        coming.update(dict.fromkeys(events[place], place))
    return [*reversed(following), coming]
