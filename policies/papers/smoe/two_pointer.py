"""SMoE's CPU-assisted scheduling (Section V-A, Algorithm 2): missing experts from the best-scored end are loaded, from
the other end computed on the CPU, so that both take about as long."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from policies.mechanism.views import INFINITE_NS, Assignment, LayerView
from policies.parts.assigners import by_tokens
from policies.parts.objective import assignment_of, durations, makespan


def split(missing: int, load_cost: int, cpu_cost: int, sooner: bool) -> int:
    """How many of ``missing`` experts to load when a load and a CPU expert cost so much, in any unit.

    Algorithm 2 gives the next expert to whichever side has been given less so far, loads first. ``sooner``: to
    whichever would be done with it sooner, loads on ties, which minimises max(n_load C_load, n_cpu C_cpu), Eq. 4.
    """
    loads, t_load, t_cpu = 0, 0, 0
    for _ in range(missing):
        if t_load + sooner * load_cost <= t_cpu + sooner * cpu_cost:
            loads, t_load = loads + 1, t_load + load_cost
        else:
            t_cpu += cpu_cost
    return loads


class TwoPointer:
    """What is on the GPU, or on its way, runs there; missing experts are split by :func:`split`.

    C_load is the layer's copy time, C_cpu the mean time of the last ``history`` CPU experts (the paper's p, not
    published: 32, ours). A policy has no clock: both are the planner's times of what was decided, not measurements. The
    first time C_cpu is the mean over the layer's missing experts. An expert that several tokens need counts once, with
    the highest of their scores (ours). GPU time is ignored, as in the paper. ``sooner``: see :func:`split`.
    """

    def __init__(self, history: int = 32, sooner: bool = False) -> None:
        self.sooner = sooner
        self._past: deque[int] = deque(maxlen=history)

    def assign(self, view: LayerView) -> Assignment:
        """Loads by descending score, CPU experts by ascending score. Needs scores and tokens."""
        active, ready = view.routing.active, view.ready_ns
        missing = [i for i, expert in enumerate(active) if ready[expert] == INFINITE_NS]
        if missing:
            scores = best_scores(view)
            missing.sort(key=lambda i: scores[active[i]], reverse=True)
        gpu_ns, cpu_ns = durations(view)
        first_cpu_ns = view.costs[view.layer].first_cpu_ns
        loads = self._loads(view, [cpu_ns[i] for i in missing])
        on_cpu = missing[loads:][::-1]
        self._past.extend(cpu_ns[i] + (first_cpu_ns if place == 0 else 0) for place, i in enumerate(on_cpu))
        on_gpu = [i not in on_cpu for i in range(len(active))]
        order = [i for i in by_tokens(view) if i not in missing] + missing[:loads] + on_cpu
        return assignment_of(view, order, on_gpu, makespan(gpu_ns, cpu_ns, on_gpu, first_cpu_ns))

    def _loads(self, view: LayerView, cpu_ns: Sequence[int]) -> int:
        """How many missing experts to load; both costs times the length of the history, to stay whole numbers."""
        past = self._past or cpu_ns
        return split(len(cpu_ns), view.costs[view.layer].copy_ns * len(past), sum(past), self.sooner)


def best_scores(view: LayerView) -> dict[int, float]:
    """Of every active expert, the highest score among the tokens that are routed to it."""
    assert view.scores is not None
    best: dict[int, float] = {}
    for ids, own in zip(view.routing.token_ids, view.scores, strict=True):
        for expert in ids:
            if own[expert] > best.get(expert, -1.0):
                best[expert] = own[expert]
    return best
