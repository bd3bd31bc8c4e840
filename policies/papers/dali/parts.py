"""DALI's dynamic assignment and workload-aware caching (Sections 4.1 and 4.3).

The exact assignment that the greedy one approximates is in ``policies.parts.exact_assignment``; residual-based
prefetching (Section 4.2) is ``TopPrefetcher`` with residual forecasts.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from operator import sub
from typing import Literal

from policies.mechanism.views import Assignment, ExpertId, LayerView, Swap, expert_ids
from policies.parts.objective import assignment_of, durations, makespan
from policies.protocols import When


class GreedyAssigner:
    """Algorithm 1: by descending |t_gpu - t_cpu|, each expert to the device that would finish it first.

    Ties go to the GPU, equal differences to the lower id. Both times start at the extra time of a first expert, which
    is 0 in the paper's profile. As in the listing, no expert is forced to the CPU by a limit on transient memory
    (Eq. 9), which is not offered: a load waits for its staging slot.
    """

    def assign(self, view: LayerView) -> Assignment:
        """Assign every active expert in one pass over the sorted list."""
        gpu_ns, cpu_ns = durations(view)
        order = by_difference(gpu_ns, cpu_ns)
        costs = view.costs[view.layer]
        t_gpu, t_cpu = costs.first_gpu_ns, costs.first_cpu_ns
        on_gpu = [False] * len(order)
        for i in order:
            gpu, cpu = t_gpu + gpu_ns[i], t_cpu + cpu_ns[i]
            if gpu <= cpu:
                on_gpu[i] = True
                t_gpu = gpu
            else:
                t_cpu = cpu
        expected_ns = max(t_gpu if True in on_gpu else 0, t_cpu if False in on_gpu else 0)
        return assignment_of(view, order, on_gpu, expected_ns)


class BeamAssigner:
    """Appendix A.2: Algorithm 1's order, keeping the ``width`` best partial assignments instead of one.

    Our reading of "best": least max(T_gpu, T_cpu), then least sum; equal states are kept once.
    """

    def __init__(self, width: int = 2) -> None:
        self.width = width

    def assign(self, view: LayerView) -> Assignment:
        """Branch every kept state to GPU and CPU, expert by expert."""
        gpu_ns, cpu_ns = durations(view)
        order = by_difference(gpu_ns, cpu_ns)
        first_cpu_ns, first_gpu_ns = view.costs[view.layer].first_cpu_ns, view.costs[view.layer].first_gpu_ns
        states = [(first_gpu_ns, first_cpu_ns, 0)]  # T_gpu, T_cpu, bits of those on the GPU
        for i in order:
            gpu, cpu, bit = gpu_ns[i], cpu_ns[i], 1 << i
            branches = {(g + gpu, c): bits | bit for g, c, bits in reversed(states)}
            branches |= {(g, c + cpu): bits for g, c, bits in reversed(states)}
            best = sorted(branches, key=lambda state: (max(state), sum(state), state))[: self.width]
            states = [(*state, branches[state]) for state in best]
        on_gpu = [bool(states[0][2] >> i & 1) for i in range(len(order))]
        expected = makespan(gpu_ns, cpu_ns, on_gpu, first_cpu_ns, first_gpu_ns)
        return assignment_of(view, order, on_gpu, expected)


def by_difference(gpu_ns: Sequence[int], cpu_ns: Sequence[int]) -> list[int]:
    """Positions by descending |t_gpu - t_cpu|, ties to the lower position (Algorithm 1, line 5)."""
    gaps = list(map(abs, map(sub, gpu_ns, cpu_ns)))
    return sorted(range(len(gaps)), key=gaps.__getitem__, reverse=True)


class WindowCache:
    """Section 4.3, Algorithm 2: every ``window`` steps the ``update`` busiest absent experts of a layer replace the
    ``update`` least busy residents. One prefill counts as one step, in however many chunks it comes: all its tokens
    count, and an update that is due then is made after the first chunk (our reading, as nothing marks the last one).
    Loads are not admitted; with ``admits`` each takes the slot of the resident with the fewest tokens in the window,
    of equal ones the least recently used.

    Where the listing and the text differ, this is the text, and the listing is a parameter: ``early`` swaps after the
    first step already (line 9 tests ``i mod w`` from i = 0); ``evict`` "busiest" takes line 11's TopK literally.
    Ours: ``guard`` swaps only while the incoming expert was the busier one; ``stagger`` lets layer l be due l steps
    earlier, so that not all layers flood the link at once. Ties go to the lower id.
    """

    def __init__(
        self, layers: int, experts: int, window: int, update: int, *,
        guard: bool = False, stagger: bool = False, early: bool = False, evict: Literal["idlest", "busiest"] = "idlest",
        admits: bool = False,
    ) -> None:
        self.admits = admits
        self.window = window
        self.update = update
        self.guard = guard
        self._phase = [(layer if stagger else 0) + (window - 1 if early else 0) for layer in range(layers)]
        self._busiest = evict == "busiest"
        self._experts = frozenset(range(experts))
        self._scores = [[0] * experts for _ in range(layers)]  # tokens of every expert since the last update
        self._steps = [0] * layers
        self._used = [[0] * experts for _ in range(layers)]  # the step in which an expert was used last
        self._prefills = [False] * layers  # is the layer's present step a prefill?
        self._begins = True  # is this the first time that the layer is at work in this step?
        self._members: list[set[int]] = [set() for _ in range(layers)]  # including those in flight
        self._groups: dict[int, set[ExpertId]] = {}  # the same, by whose slots they have

    def observe(self, view: LayerView) -> None:
        """Add the step's workloads (Eq. 12)."""
        layer, prefill = view.layer, view.phase == "prefill"
        self._begins = not (prefill and self._prefills[layer])
        self._prefills[layer] = prefill
        self._steps[layer] += self._begins
        scores, used, step = self._scores[layer], self._used[layer], self._steps[layer]
        for expert, workload in zip(view.routing.active, view.routing.tokens, strict=True):
            scores[expert] += workload
            used[expert] = step

    def admitted(self, key: ExpertId, group: int) -> None:
        """The expert has, or is promised, a slot."""
        self._members[key.layer].add(key.expert)
        self._groups.setdefault(group, set()).add(key)

    def evicted(self, key: ExpertId, group: int) -> None:
        """The expert has lost its slot."""
        self._members[key.layer].discard(key.expert)
        self._groups[group].discard(key)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """None, since residents change only through swaps; or the idlest of the group."""
        if not self.admits:
            return None
        free = [key for key in self._groups.get(group, ()) if key not in blocked]
        return min(free, key=self._idleness, default=None)

    def _idleness(self, key: ExpertId) -> tuple[int, int, ExpertId]:
        """Less for those that may leave sooner."""
        return self._scores[key.layer][key.expert], self._used[key.layer][key.expert], key

    def order(self, incoming: Sequence[ExpertId]) -> Sequence[ExpertId]:
        """As given."""
        return incoming

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        """At the end of a layer whose window is full: the busiest absent experts for the idlest residents."""
        layer = view.layer
        if when != "layer_end" or not self._begins or (self._steps[layer] + self._phase[layer]) % self.window:
            return ()
        scores = self._scores[layer]
        members, resident = self._members[layer], view.residency.resident[layer]
        absent = sorted(self._experts - members)
        incoming = sorted(absent, key=scores.__getitem__, reverse=True)[: self.update]
        outgoing = sorted(sorted(resident), key=scores.__getitem__, reverse=self._busiest)[: self.update]
        if self.guard:
            pairs = [pair for pair in zip(incoming, outgoing, strict=False) if scores[pair[0]] > scores[pair[1]]]
            incoming, outgoing = [new for new, _ in pairs], [old for _, old in pairs]
        self._scores[layer] = [0] * len(scores)
        return list(map(Swap, expert_ids(layer, incoming), expert_ids(layer, outgoing)))
