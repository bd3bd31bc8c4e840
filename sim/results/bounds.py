"""What stands beside every prediction: a lower bound that no policy beats, and a null model without any timeline.

**The lower bound** holds for every policy that runs the experts that the router chose, each on its own layer's input
(so not for changed routing, nor for results precomputed on an earlier layer's), under the rules of DESIGN section 5,
and for clairvoyant policies too. It is the larger of two bounds, for the prefill and for all decode steps together.

*Chain.* A step is a chain, since each link needs the one before: launch, dense layers, then for every layer attention,
gate, routing to the host, synchronisation, experts, combine; then head, tokens to the host, synchronisation; only then
the host launches the next step. Suppose every expert is resident and planning is free, and let t be the time from the
end of a layer's gate. With n of its N experts on the GPU,

- the GPU is done no earlier than max(shared, t_sync + launch) + the n shortest GPU times, nor before the n-th launch
  and one expert after it;
- the CPU is done no earlier than t_sync + activations + first-expert time + the N - n shortest CPU times (+ result);
- with both at work, no earlier than the fractional split of all experts that balances the two (a linear programme,
  whose optimum gives the GPU the experts with the least GPU time per ns of CPU time that it saves);
- the launches take t_sync + n experts + combine, and the next layer's own launch follows them.

The least over n of the latest of these is what the layer takes at least. Contention and waiting only add to it.

*Traffic.* Let u be the start of an expert's run in one layer event, and u' in its next one. If no copy of it started in
(u, u'] and the later run is on the GPU, it was in memory all of that time: the run is a *hit*. (For its first event,
u is the start of the window.) All other runs are on the CPU or can be charged with a copy of their own within the
window. When an event is planned, every hit that spans this moment holds a slot, and there are C of them (capacity /
smallest expert). So hits form a set of intervals of which at most C overlap at any event, and keeping, event by event,
those that end first (Belady with bypass, from the best possible start) gives the most of them. Of the requests that
are left, n on the CPU take at least the n shortest CPU times, between synchronisation and combine, so beside all other
links of the chain; the rest take one copy each on the serial link. The least over n of the longer of the two bounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from policies.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts
from sim.demand import StepDemand
from sim.machine.hardware import Hardware
from traces.model_shape import ModelShape


class LowerBound(NamedTuple):
    """No run is faster; None where there is no such step."""

    ttft_ns: int | None
    tpot_ns: float | None


def bounds_of(
    demand: Sequence[StepDemand], costs: CostTable, capacity_bytes: int, shape: ModelShape, hardware: Hardware,
    cached_share: float, gpu_only: bool, bound: LowerBound | None = None,
) -> dict[str, float]:  # fmt: skip
    """Lower bound and null model in ms, by the name of their column; those that do not apply are left out.

    ``bound``: ``lower_bound`` of the same demand, costs and capacity, if it is known already.
    """
    bound = lower_bound(demand, costs, capacity_bytes) if bound is None else bound
    values: dict[str, float] = {}
    if bound.ttft_ns is not None:
        values["lower_bound_ttft_ms"] = bound.ttft_ns / 1e6
    if bound.tpot_ns is not None:
        values["lower_bound_tpot_ms"] = bound.tpot_ns / 1e6
        active = active_expert_bytes([step for step in demand if step.phase == "decode"], shape)
        values["null_model_tpot_ms"] = null_model(shape, hardware, active, cached_share, gpu_only) * 1e3
    return values


# --- the lower bound --------------------------------------------------------------------------------------------------


def lower_bound(demand: Sequence[StepDemand], costs: CostTable, capacity_bytes: int) -> LowerBound:
    """Lower bound on TTFT and TPOT of every policy that keeps the routing (proof: top of this file).

    ``capacity_bytes``: all GPU memory that may ever hold routed experts, cache and staging together.
    """
    prefill = [step for step in demand if step.phase == "prefill"]
    decode = [step for step in demand if step.phase == "decode"]
    return LowerBound(
        _window_ns(prefill, costs, capacity_bytes) if prefill else None,
        _window_ns(decode, costs, capacity_bytes) / len(decode) if decode else None,
    )


def _window_ns(steps: Sequence[StepDemand], costs: CostTable, capacity_bytes: int) -> int:
    return max(_chain_ns(steps, costs), _traffic_ns(steps, costs, capacity_bytes))


def _chain_ns(steps: Sequence[StepDemand], costs: CostTable) -> int:
    known: dict[tuple[int, tuple[int, ...], StepCosts], int] = {}  # most layers repeat a workload
    total = 0
    for step in steps:
        step_costs = costs.step(step.tokens, step.context)
        total += _once_ns(step_costs, costs)
        alike = step_costs._replace(attention_ns=0, dense_ns=0)
        for expert_costs, routing in zip(costs.experts, step.routings, strict=True):
            key = (id(expert_costs), routing.tokens, alike)
            if key not in known:
                known[key] = _experts_ns(expert_costs, routing.tokens, alike, costs)
            total += step_costs.attention_ns + step_costs.gate_ns + known[key]
    return total


def _once_ns(step: StepCosts, costs: CostTable) -> int:
    """The links of the chain that a step has once."""
    return costs.launch_ns + costs.dense_launch_ns + step.dense_ns + step.head_ns + step.routing_ns + costs.sync_ns


def _experts_ns(expert: ExpertCosts, tokens: Sequence[int], step: StepCosts, costs: CostTable) -> int:
    """The least time from the end of a layer's gate to the start of the next layer's attention (or of the head)."""
    gpu, cpu = ([table[w] for w in tokens] for table in (expert.gpu_ns, expert.cpu_ns))
    synced = step.routing_ns + costs.sync_ns
    on_link = costs.result_path == "h2d"
    gpu_from = max(step.shared_ns, synced + costs.expert_launch_ns)
    cpu_from = synced + step.activations_ns + expert.first_cpu_ns + step.result_ns * on_link
    split = _fractional_split(gpu, cpu, gpu_from, cpu_from)
    gpu_sums, cpu_sums = _prefix_sums(gpu), _prefix_sums(cpu)
    least = []
    for n, gpu_sum in enumerate(gpu_sums):
        on_cpu = len(gpu) - n
        launched = synced + n * costs.expert_launch_ns
        done = max(gpu_from + gpu_sum, launched + gpu_sums[1]) if n else step.shared_ns
        if on_cpu:
            done = max(done, cpu_from + cpu_sums[on_cpu], split if n else 0)
        launched += costs.combine_launch_ns
        combine = step.combine_ns + step.result_ns * (on_cpu > 0 and not on_link)
        least.append(max(max(done, launched) + combine, launched + min(costs.launch_ns, costs.head_launch_ns)))
    return min(least)


def _prefix_sums(times: Sequence[int]) -> list[int]:
    """Sums of the 0, 1, 2, ... shortest times."""
    sums = [0]
    for time in sorted(times):
        sums.append(sums[-1] + time)
    return sums


def _fractional_split(gpu: Sequence[int], cpu: Sequence[int], gpu_from: int, cpu_from: int) -> int:
    """The least max(GPU end, CPU end) if experts could be divided, rounded down."""
    on_gpu, on_cpu = gpu_from, cpu_from + sum(cpu)
    for g, c in sorted(zip(gpu, cpu, strict=True), key=lambda times: times[0] / times[1]):
        if on_gpu + g >= on_cpu - c:
            part = min(max((on_cpu - on_gpu) / (g + c), 0.0), 1.0)  # of this expert, on the GPU
            return max(on_gpu, int(on_cpu - part * c) - 1)  # less one: the division is not exact
        on_gpu, on_cpu = on_gpu + g, on_cpu - c
    return max(on_gpu, on_cpu)


def _traffic_ns(steps: Sequence[StepDemand], costs: CostTable, capacity_bytes: int) -> int:
    """What misses take at least, over all ``steps``."""
    layers = range(len(costs.experts))
    events = [[layer << 20 | e for e in step.routings[layer].active] for step in steps for layer in layers]
    misses = least_misses(events, capacity_bytes // min(expert.bytes for expert in costs.experts))
    tables = [expert.cpu_ns for expert in costs.experts]
    cpu = np.sort([tables[layer][w] for step in steps for layer in layers for w in step.routings[layer].tokens])
    on_cpu = np.concatenate([[0], np.cumsum(cpu[:misses])]) + sum(_fixed_ns(step, costs) for step in steps)
    on_link = np.arange(misses, -1, -1) * min(expert.copy_ns for expert in costs.experts)
    return int(np.maximum(on_cpu, on_link).min())


def _fixed_ns(step: StepDemand, costs: CostTable) -> int:
    """All of a step's chain beside its experts."""
    c = costs.step(step.tokens, step.context)
    layer = c.attention_ns + c.gate_ns + c.routing_ns + costs.sync_ns + c.combine_ns
    return _once_ns(c, costs) + layer * len(costs.experts)


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


# --- the null model ---------------------------------------------------------------------------------------------------


def active_expert_bytes(steps: Sequence[StepDemand], shape: ModelShape) -> float:
    """Bytes of the experts that a step activates, averaged over ``steps``."""
    sizes = [shape.expert_bytes_of(layer) for layer in range(shape.moe_layers)]
    active = sum(size * len(r.active) for step in steps for size, r in zip(sizes, step.routings, strict=True))
    return active / len(steps)


def null_model(
    shape: ModelShape, hardware: Hardware, active_bytes: float, cached_share: float, gpu_only: bool
) -> float:
    """Seconds of one decode step from bandwidths and bytes alone, as if everything happened one after the other.

    Every non-expert weight and the cached share of ``active_bytes`` (routed experts of a step) is read at the GPU's
    bandwidth, the rest at the CPU's, or at the link's where the policy computes on the GPU alone. The idea is llmfit's
    closed form (AlexsJones/llmfit, llmfit-core/src/fit.rs), which adds the same two terms; the effective bandwidths are
    the hardware profile's own.
    """
    embedding = 0 if shape.tied_embeddings else shape.vocab * shape.hidden * shape.dense_bits / 8  # one row is read
    on_gpu = shape.non_expert_bytes - embedding + cached_share * active_bytes
    slow = hardware.link.expert_bytes_per_s if gpu_only else hardware.cpu.read_bytes_per_s
    return on_gpu / hardware.gpu.read_bytes_per_s + (1 - cached_share) * active_bytes / slow
