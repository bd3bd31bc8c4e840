"""Assignment by the timeline of a layer instead of a sum of durations (ours): copies follow each other on the link,
each loaded expert runs when it has arrived, the CPU works meanwhile, and both slow each other down.

With experts of one size, the loads of least makespan are the largest absent workloads, and the residents that the CPU
takes over, if any, are the smallest: no other choice of the same numbers relieves either side more. So only numbers are
searched: how many residents stay on the GPU, and how many absent experts are loaded. An expert is taken to
compute on the GPU no longer than its copy takes, and the CPU's experts to share the DRAM as their mean does. (Copies
are slowed least by the experts of most tokens; that is not searched.) An expert that is copied runs by itself; those
that are there share the kernels of ``first_gpu_ns``. Launches overlap copies, and each is as much of the GPU's time as
it is longer than what it launches.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertCosts, LayerView
from policies.parts.assigners import by_tokens
from policies.parts.objective import assignment_of, together

_MOST_KNOWN = 4096  # choices


class Choice(NamedTuple):
    """A makespan in ns and the numbers that give it."""

    makespan_ns: int
    stay: int
    loads: int


Workloads: TypeAlias = tuple[int, ...]  # tokens of experts, descending


class Layer(NamedTuple):
    """State that a choice depends on: the experts of a layer on the GPU, absent, and in flight, these to run on the GPU
    (``awaited``) or on the CPU (``left``); and when the link and the CPU are free."""

    here: Workloads
    absent: Workloads
    awaited: Workloads
    left: Workloads
    h2d_backlog_ns: int
    cpu_backlog_ns: int


class PipelineAssigner:
    """The choice of least makespan; among equals, the one with the most residents on the GPU and the fewest loads.

    An expert that is being copied runs on the GPU only where waiting for it is no slower than the CPU.

    A load also serves later tokens, which find the expert in the cache, and the makespan of one layer does not show
    that. ``copy_weight``: the part of a copy's time that counts; with 1, nothing is loaded where this layer alone would
    be no sooner ready.
    """

    def __init__(self, copy_weight: float = 1.0) -> None:
        self.copy_weight = copy_weight
        self._known: dict[tuple[int, Layer], Choice] = {}  # by layer of the model: many layers of a decode are alike

    def assign(self, view: LayerView) -> Assignment:
        """Choose the numbers, with the expert in flight (if there is one) on either side."""
        active, tokens, ready = view.routing.active, view.routing.tokens, view.ready_ns
        order = by_tokens(tokens)
        here: list[int] = []
        absent: list[int] = []
        coming: list[int] = []
        for i in order:
            transfer = ready[active[i]]
            (absent if transfer == INFINITE_NS else coming if transfer else here).append(i)
        there, missing, arriving = (tuple([tokens[i] for i in places]) for places in (here, absent, coming))
        layer = Layer(there, missing, arriving, (), view.h2d_backlog_ns, view.cpu_backlog_ns)
        choice, waits = self._choose(view, layer), coming
        if coming:
            leaves = self._choose(view, layer._replace(awaited=(), left=layer.awaited))
            if leaves.makespan_ns < choice.makespan_ns:
                choice, waits = leaves, []
        on_gpu = [False] * len(active)
        for i in (*here[: choice.stay], *absent[: choice.loads], *waits):
            on_gpu[i] = True
        return assignment_of(view, order, on_gpu, choice.makespan_ns)

    def _choose(self, view: LayerView, layer: Layer) -> Choice:
        """``choose``, kept where the link is free, as its backlog is hardly ever the same."""
        costs = view.costs[view.layer]
        if self.copy_weight < 1:
            costs = costs._replace(copy_ns=round(self.copy_weight * costs.copy_ns))
        if layer.h2d_backlog_ns:
            return choose(costs, layer)
        key = view.layer, layer
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = choose(costs, layer)
        return self._known[key]


def choose(costs: ExpertCosts, layer: Layer) -> Choice:
    """The best numbers."""
    here, absent, awaited, left, _, _ = layer
    gpu_ns, cpu_ns, alone_ns = costs.gpu_ns, costs.cpu_ns, costs.first_gpu_ns
    gpu = sum([_on_gpu_ns(costs, tokens) for tokens in (*here, *awaited)]) + len(awaited) * alone_ns
    cpu = sum([cpu_ns[tokens] for tokens in (*absent, *left)])
    last_ns = gpu_ns[awaited[0]] + alone_ns if awaited else None
    experts = len(absent) + len(left)  # that the CPU computes
    best, floor = _with_loads(costs, layer, len(here), gpu, cpu, experts, last_ns, INFINITE_NS)
    for stay in range(len(here) - 1, -1, -1):
        if floor >= best.makespan_ns:
            break  # the GPU is not the bottleneck, and the CPU's work only grows
        gpu -= _on_gpu_ns(costs, here[stay])
        cpu += cpu_ns[here[stay]]
        experts += 1
        choice, floor = _with_loads(costs, layer, stay, gpu, cpu, experts, last_ns, best.makespan_ns)
        if choice.makespan_ns < best.makespan_ns:
            best = choice
    return best


def _with_loads(
    costs: ExpertCosts, layer: Layer, stay: int, gpu: int, cpu: int, experts: int, last_ns: int | None, below_ns: int
) -> tuple[Choice, int]:
    """The best number of loads, and the least makespan in ns that a GPU which computes in no time would allow; both are
    right as far as they are below ``below_ns``.

    Without any load, the GPU works for ``gpu`` ns in addition to kernels that residents share, the last ``last_ns`` of
    them on the expert in flight (None: there is none), and the CPU for ``cpu`` ns on ``experts``.
    """
    gpu_ns, cpu_ns, copy_ns, alone_ns = costs.gpu_ns, costs.cpu_ns, costs.copy_ns, costs.first_gpu_ns
    start, copies = layer.cpu_backlog_ns + costs.exchange_ns + costs.first_cpu_ns, layer.h2d_backlog_ns
    gpu += alone_ns if stay else 0
    cpu_end, arrived = _together(costs, start, cpu, experts, copies)
    floor = max(cpu_end, 0 if last_ns is None else arrived + last_ns)
    least_ns, best = min(max(gpu, floor), below_ns), 0
    for loads, count in enumerate(layer.absent, 1):  # some hundred thousand in a run: without calls of min and max
        cpu -= cpu_ns[count]
        copies += copy_ns
        if copies >= least_ns:
            break  # too late even without contention
        gpu += _on_gpu_ns(costs, count) + alone_ns
        if gpu >= least_ns > floor:
            break  # too much for the GPU, and known to be enough for the others
        if cpu and start + cpu >= least_ns:
            continue  # too much for the CPU even without contention
        cpu_end, arrived = _together(costs, start, cpu, experts - loads, copies)
        others = arrived + gpu_ns[count] + alone_ns
        if others < cpu_end:
            others = cpu_end
        if others < floor:
            floor = others
        makespan_ns = gpu if gpu > others else others
        if makespan_ns < least_ns:
            least_ns, best = makespan_ns, loads
    return Choice(least_ns, stay, best), floor


def _on_gpu_ns(costs: ExpertCosts, tokens: int) -> int:
    """How long an expert occupies the GPU, which waits for its kernels where the host is slower to launch them."""
    own_ns, launch_ns = costs.gpu_ns[tokens], costs.launch_ns
    return own_ns if own_ns > launch_ns else launch_ns


def _together(costs: ExpertCosts, start_ns: int, cpu_ns: int, experts: int, copies_ns: int) -> tuple[int, int]:
    """``together``, for ``experts`` that the CPU begins after ``start_ns`` of other work, taken to be all reading."""
    if not experts:
        return 0, copies_ns
    return together(costs, start_ns + cpu_ns, start_ns + experts * costs.cpu_ns[1], copies_ns)
