"""Bounds of a prediction: a lower bound that no policy beats, and the null model (``null_model``), which adds up bytes
over bandwidths without a timeline.

The lower bound holds for every policy that runs the experts that the router chose, each on its own layer's input and
for its own layer's output (so not for changed routing, nor for results that are precomputed on an earlier layer's or
added to a later one's), under the rules of the time model, and for clairvoyant policies too. It is the larger of two
bounds, for the prefill and for all decode steps together.

*Chain.* A step is a chain, since each link needs the one before: drafts, launch, dense layers, then for every layer
attention, gate, routing to the host, synchronisation, experts, combine; then head, tokens to the host, synchronisation;
only then the host launches the next step. The GPU can start as soon as a launch's lead is over, and is not done before
its tail (``sim.timeline.gpu_lane``). Suppose every expert is resident and planning is free, and let t be the time from
the end of a layer's gate. With n of its N experts on the GPU,

- the GPU is done no earlier than max(shared, t_sync + lead) + the first expert's extra time + the n shortest GPU times,
  nor, for n > 1, before n - 1 launches, a lead and one expert after them, nor before the n-th launch and its tail;
- the CPU is done no earlier than t_sync + activations + first-expert time + the N - n shortest CPU times (+ result);
- with both at work, no earlier than the fractional split of all experts that balances the two (a linear programme,
  whose optimum gives the GPU the experts with the least GPU time per ns of CPU time that it saves);
- the launches take t_sync + n experts (the first with its extra time) + combine, and the lead of the next layer's own
  launch, or the head's, follows.

Where D GPUs compute a layer together, the n experts take at least a D-th of their GPU times, at those of the quickest,
after a first launch (those of another GPU need not wait for shared), and each crossing at least no time.

The latest of these is when the next attention, or the head, starts at the earliest. The end of the next gate, or of the
head, is also no earlier than its launch and a tail after the launch of combine. The least over n of the later of the
two is what is added up. Contention and waiting only add to it.

*Traffic.* Copies and CPU experts that no cache of a size can avoid. Let u be the start of an expert's run in one layer
event, and u' in its next one. If no copy of it started in (u, u'] and the later run is on the GPU, it was in memory all
of that time: the run is a *hit*. (For its first event, u is the start of the window.) All other runs are on the CPU or
can be charged with a copy of their own within the window. When an event is planned, every hit that spans this moment
holds a slot, and there are C of them (capacity / smallest expert). So hits form a set of intervals of which at most C
overlap at any event, and keeping, event by event, those that end first (Belady with bypass, from the best possible
start) gives the most of them. Of the requests that are left, n on the CPU take at least the n shortest CPU times,
between synchronisation and combine, so in addition to all other links of the chain; the rest take one copy each on the
serial link. The least over n of the longer of the two bounds.

*Disk.* Where a disk holds what the host has no room for, a run is a hit if its expert was in the memory of the host or
of the GPU all of that time, and else can be charged with a read of its own. By the same argument both memories together
are one cache, and its misses take one read each on the serial disk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts
from sim.machine.hardware import Hardware
from sim.runs.demand import StepDemand
from sim.runs.sampling import weights_of
from traces.models.shape import ModelShape


class LowerBound(NamedTuple):
    """The least times that any policy can reach; None where there is no such step."""

    ttft_ns: int | None
    tpot_ns: float | None


def lower_bound(
    demand: Sequence[StepDemand], costs: CostTable, capacity_bytes: int, answer_tokens: int | None = None,
    host_bytes: int | None = None,
) -> LowerBound:
    """The lower bound at one capacity; see ``LowerBounds``."""
    return LowerBounds(demand, costs, answer_tokens, host_bytes).at(capacity_bytes)


class LowerBounds:
    """Lower bounds on TTFT and TPOT of every policy that keeps the routing (proof: top of this file).

    ``answer_tokens``: see ``sim.runs.sampling``. The bound holds for any steps that follow each other, whatever came
    before: so for those that stand for themselves and for the others, and for the same mean of both as TPOT.
    ``host_bytes``: of the host's memory for experts, above a disk; None: it has room for all of them. ``links``: to
    GPUs, which carry copies at the same time; ``together``: so many of them compute a layer at the same time.
    """

    def __init__(
        self, demand: Sequence[StepDemand], costs: CostTable, answer_tokens: int | None = None,
        host_bytes: int | None = None, links: int = 1, together: int = 1,
    ) -> None:
        prefill = [step for step in demand if step.phase == "prefill"]
        decode = [step for step in demand if step.phase == "decode"]
        made = [step.generated for step in decode]
        self._answer = answer_tokens or sum(made)
        weights = weights_of([step.index for step in decode], self._answer, made)
        given = costs, host_bytes, links, together
        self._prefill = [_BoundedSteps(prefill, *given)] if prefill else []
        alone = sum(step.index < weights.late_step for step in decode)
        parts = ((decode[:alone], 1), (decode[alone:], weights.later))
        self._decode = [(_BoundedSteps(steps, *given), weight) for steps, weight in parts if steps]
        self._known: dict[int, LowerBound] = {}

    def at(self, capacity_bytes: int) -> LowerBound:
        """The bound where ``capacity_bytes`` of the GPU may hold routed experts, in cache and staging together."""
        if capacity_bytes not in self._known:
            ttft_ns = [window.least_ns(capacity_bytes) for window in self._prefill]
            answer_ns = [window.least_ns(capacity_bytes) * weight for window, weight in self._decode]
            self._known[capacity_bytes] = LowerBound(
                ttft_ns[0] if ttft_ns else None, sum(answer_ns) / self._answer if answer_ns else None
            )
        return self._known[capacity_bytes]


class _BoundedSteps:
    """Bound of a run of consecutive steps."""

    def __init__(
        self, steps: Sequence[StepDemand], costs: CostTable, host_bytes: int | None, links: int, together: int
    ) -> None:
        self._steps, self._costs, self._host_bytes, self._links = steps, costs, host_bytes, links
        self._least_chain_ns = _chain_ns(steps, costs, together)

    def least_ns(self, capacity_bytes: int) -> int:
        """Least duration of the steps in ns, with ``capacity_bytes`` of GPU memory for experts."""
        fixed_ns = sum(_fixed_ns(step, self._costs) for step in self._steps)
        traffic_ns = _traffic_ns(self._steps, self._costs, capacity_bytes, fixed_ns, self._links)
        disk_ns = 0
        if self._host_bytes is not None:
            reads = _misses(self._steps, self._costs, capacity_bytes + self._host_bytes)
            disk_ns = reads * min(expert.read_ns for expert in self._costs.experts)
        return max(self._least_chain_ns, traffic_ns, disk_ns)


# --- chain ------------------------------------------------------------------------------------------------------------


def _chain_ns(steps: Sequence[StepDemand], costs: CostTable, together: int) -> int:
    known: dict[tuple[int, tuple[int, ...], StepCosts, int], list[_Split]] = {}  # most layers repeat a workload
    total = 0
    for step in steps:
        step_costs = costs.step(step.tokens, step.context, step.head_rows)
        alike = step_costs._replace(attention_ns=0, dense_ns=0)
        gated, headed = _next_gate(step_costs, costs), _head(step_costs, costs)
        total += _first_gate_ns(step, step_costs, costs) + step_costs.routing_ns + costs.sync_ns
        for layer, (expert_costs, routing) in enumerate(zip(costs.experts, step.routings, strict=True), 1):
            after = gated if layer < len(costs.experts) else headed
            key = (id(expert_costs), routing.tokens, alike, after.launch_ns)
            if key not in known:
                known[key] = _splits(expert_costs, routing.tokens, alike, costs, after.launch_ns, together)
            splits = known[key]
            total += min([max(start + after.gpu_ns, launched + after.launched_ns) for start, launched in splits])
    return total


class _Split(NamedTuple):
    """Least times from the end of a layer's gate, for one number of its experts on the GPU."""

    next_ns: int  # until the start of the next layer's attention, or of the head
    launched_ns: int  # until the end of the launch of combine


class _After(NamedTuple):
    """Work that follows a layer's experts: its launch, its GPU time, and its least time from the launch on."""

    launch_ns: int
    gpu_ns: int
    launched_ns: int


def _next_gate(step: StepCosts, costs: CostTable) -> _After:
    """Work after a layer that is not the last: attention and gate of the next one."""
    launched = costs.attention_launch_ns + costs.gate_launch_ns + costs.tail_of(step.gate_ns)
    return _After(costs.launch_ns, step.attention_ns + step.gate_ns, launched)


def _head(step: StepCosts, costs: CostTable) -> _After:
    """Work after the last layer: the language-model head."""
    return _After(costs.head_launch_ns, step.head_ns, costs.head_launch_ns + costs.tail_of(step.head_ns))


def _first_gate_ns(demand: StepDemand, step: StepCosts, costs: CostTable) -> int:
    """Least time in ns from the beginning of a step to the end of its first gate, drafts included."""
    gate, dense_launch_ns = _next_gate(step, costs), costs.dense_launch_ns
    drafted_ns, launched_ns = _drafted(demand, costs)
    first = max(drafted_ns, launched_ns + costs.lead_of(dense_launch_ns + gate.launch_ns))
    return max(first + step.dense_ns + gate.gpu_ns, launched_ns + dense_launch_ns + gate.launched_ns)


def _drafted(demand: StepDemand, costs: CostTable) -> tuple[int, int]:
    """Times in ns from the beginning of a step to the end of its drafts on the GPU, and to that of their launch."""
    if not demand.drafted:
        return 0, 0
    gpu_ns, launch_ns = (ns * demand.drafted for ns in costs.draft_costs(demand.context[0]))
    return costs.lead_of(launch_ns) + gpu_ns, launch_ns


def _splits(
    expert: ExpertCosts, tokens: Sequence[int], step: StepCosts, costs: CostTable, next_launch_ns: int,
    together: int,
) -> list[_Split]:
    """Least times of a layer with 0, 1, 2, ... of its experts on the GPU, or on all that work together."""
    gpu_ns, cpu_ns = ([table[w] for w in tokens] for table in (expert.gpu_ns, expert.cpu_ns))
    part_ns = [ns // together for ns in gpu_ns]
    synced_ns = step.routing_ns + costs.sync_ns
    on_link = costs.result_path == "h2d"
    launch_ns, first_ns = costs.expert_launch_ns, costs.expert_launch_ns + costs.first_expert_launch_ns
    gpu_from_ns = synced_ns + costs.lead_of(first_ns) + expert.first_gpu_ns
    if together == 1:
        gpu_from_ns = max(gpu_from_ns, step.shared_ns + expert.first_gpu_ns)
    cpu_from_ns = synced_ns + step.activations_ns + expert.first_cpu_ns + step.result_ns * on_link
    split_ns = _fractional_split(part_ns, cpu_ns, gpu_from_ns, cpu_from_ns)
    gpu_sums_ns, cpu_sums_ns = _prefix_sums(gpu_ns), _prefix_sums(cpu_ns)
    splits = []
    for n, gpu_sum_ns in enumerate(gpu_sums_ns):
        on_cpu = len(gpu_ns) - n
        launched_ns, done_ns = synced_ns, step.shared_ns
        if n:
            launched_ns += first_ns + (n - 1) * launch_ns
            last_ns = costs.lead_of(launch_ns) - launch_ns + gpu_sums_ns[1] if n > 1 else 0
            all_ns = gpu_from_ns + gpu_sum_ns // together
            done_ns = max(done_ns, all_ns, launched_ns + max(last_ns, costs.tail_of(gpu_sums_ns[1])))
        if on_cpu:
            done_ns = max(done_ns, cpu_from_ns + cpu_sums_ns[on_cpu], split_ns if n else 0)
        combine_ns = step.combine_ns + step.result_ns * (on_cpu > 0 and not on_link)
        added_ns = max(done_ns, launched_ns + costs.lead_of(costs.combine_launch_ns)) + combine_ns
        launched_ns += costs.combine_launch_ns
        next_ns = max(added_ns, launched_ns + max(costs.tail_of(combine_ns), costs.lead_of(next_launch_ns)))
        splits.append(_Split(next_ns, launched_ns))
    return splits


def _prefix_sums(times_ns: Sequence[int]) -> list[int]:
    """Sums in ns of the 0, 1, 2, ... shortest times."""
    sums = [0]
    for time_ns in sorted(times_ns):
        sums.append(sums[-1] + time_ns)
    return sums


def _fractional_split(gpu_ns: Sequence[int], cpu_ns: Sequence[int], gpu_from_ns: int, cpu_from_ns: int) -> int:
    """Least max(GPU end, CPU end) in ns if experts could be divided, rounded down."""
    on_gpu_ns, on_cpu_ns = gpu_from_ns, cpu_from_ns + sum(cpu_ns)
    for g, c in sorted(zip(gpu_ns, cpu_ns, strict=True), key=lambda times: times[0] / times[1]):
        if on_gpu_ns + g >= on_cpu_ns - c:
            part = min(max((on_cpu_ns - on_gpu_ns) / (g + c), 0.0), 1.0)  # of this expert, on the GPU
            return max(on_gpu_ns, int(on_cpu_ns - part * c) - 1)  # less one: the division is not exact
        on_gpu_ns, on_cpu_ns = on_gpu_ns + g, on_cpu_ns - c
    return max(on_gpu_ns, on_cpu_ns)


def _fixed_ns(step: StepDemand, costs: CostTable) -> int:
    """Duration in ns of a step's chain without its experts."""
    c = costs.step(step.tokens, step.context, step.head_rows)
    synced, (drafted_ns, launched_ns) = c.routing_ns + costs.sync_ns, _drafted(step, costs)
    first = max(drafted_ns, launched_ns + costs.lead_of(costs.launch_ns + costs.dense_launch_ns))
    once = first + c.dense_ns + c.head_ns + synced
    return once + (c.attention_ns + c.gate_ns + synced + c.combine_ns) * len(costs.experts)


# --- traffic ----------------------------------------------------------------------------------------------------------


def _traffic_ns(
    steps: Sequence[StepDemand], costs: CostTable, capacity_bytes: int, fixed_ns: int, links: int
) -> int:
    """Least time in ns that the misses of ``steps`` take; ``fixed_ns``: duration of their chain without experts."""
    layers, misses = range(len(costs.experts)), _misses(steps, costs, capacity_bytes)
    tables = [expert.cpu_ns for expert in costs.experts]
    cpu = np.sort([tables[layer][w] for step in steps for layer in layers for w in step.routings[layer].tokens])
    on_cpu = np.concatenate([[0], np.cumsum(cpu[:misses])]) + fixed_ns
    on_link = np.arange(misses, -1, -1) * min(expert.copy_ns for expert in costs.experts) // links
    return int(np.maximum(on_cpu, on_link).min())


def _misses(steps: Sequence[StepDemand], costs: CostTable, capacity_bytes: int) -> int:
    """Requests that no cache of so many bytes can serve."""
    layers = range(len(costs.experts))
    events = [[layer << 20 | e for e in step.routings[layer].active] for step in steps for layer in layers]
    return least_misses(events, capacity_bytes // min(expert.expert_bytes for expert in costs.experts))


def least_misses(events: Sequence[Sequence[int]], capacity: int) -> int:
    """Number of requests that no cache of ``capacity`` equal slots can serve, whatever it holds at the start.

    An event asks for several experts together, in any order; a miss need not be kept.
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
    """The next use of an event's experts, as far as there is one, by event; last, the first use of every expert."""
    coming: dict[int, int] = {}
    following = []
    for place in range(len(events) - 1, -1, -1):
        following.append({expert: coming[expert] for expert in events[place] if expert in coming})
        coming.update(dict.fromkeys(events[place], place))
    return [*reversed(following), coming]


# --- the null model ---------------------------------------------------------------------------------------------------


class StepBytes(NamedTuple):
    """Bytes that a mean decode step of an answer reads in addition to the weights that every token needs."""

    experts: float  # active routed experts
    cache: float  # keys and values, and states
    tokens: float = 1  # that the step makes of each sequence


def step_bytes(steps: Sequence[StepDemand], shape: ModelShape, answer_tokens: int | None = None) -> StepBytes:
    """Means over an answer of ``answer_tokens``, for which ``steps`` stand (``sim.runs.sampling``); None: over them."""
    sizes = shape.expert_bytes_by_layer
    experts = [sum(size * len(r.active) for size, r in zip(sizes, step.routings, strict=True)) for step in steps]
    cache = [sum(map(shape.cache_bytes, step.context)) for step in steps]
    numbers, made = [step.index for step in steps], [step.generated for step in steps]
    weights = weights_of(numbers, answer_tokens or sum(made), made).of(np.array(numbers))
    return StepBytes(*(float(np.average(values, weights=weights)) for values in (experts, cache, made)))


def null_model(
    shape: ModelShape, hardware: Hardware, read: StepBytes, cached_share: float, gpu_only: bool,
    disk_s: Callable[[float], float] = lambda size: 0.0,
) -> float:
    """Seconds a token from bandwidths and bytes alone, as if everything in a decode step happened one after the other.

    Every non-expert weight, the KV cache and the cached share of the active experts is read at the GPU's bandwidth, the
    other experts at the CPU's, or at the link's where the policy computes on the GPU alone. The idea is llmfit's
    closed form (AlexsJones/llmfit, llmfit-core/src/fit.rs), which adds the same two terms; the effective bandwidths are
    the hardware profile's own. Drafts, where a step verifies some, are made in no time. ``disk_s``: seconds to read
    what the host has no room for, of so many bytes of experts.
    """
    on_gpu = shape.product_bytes + read.cache + cached_share * read.experts
    slow = hardware.link.expert_bytes_per_s if gpu_only else hardware.cpu.read_bytes_per_s
    step_s = on_gpu / hardware.gpu.read_bytes_per_s + (1 - cached_share) * read.experts / slow
    return (step_s + disk_s((1 - cached_share) * read.experts)) / read.tokens
