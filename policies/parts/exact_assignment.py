"""Exact assignment: the 0-1 programme of DALI, Section 4.1 (Eq. 3-9), solved to optimality.

The paper names no solver, and reports that it takes 55 % of the inference time. Ours takes far less. It is a dynamic
programme over an expanding core, after Pisinger's MINKNAP for the knapsack problem: start from the best split in order
of t_cpu / t_gpu, then let one expert after another, nearest to the split first, change sides. A state is (T_gpu,
T_cpu); dominated states go, and so do those whose relaxation, in which the experts left may be divided between the
devices, cannot beat the best choice so far. Equal states merge, so that many equal experts cost no more than their
count. Everything is integer arithmetic: the optimum is exact. Eq. 9 (a limit on transient memory, with the CPU forced
where the buffer is full) is not offered: loads wait for their staging slots.

A decode layer of 128 active experts takes a fraction of a millisecond, a long prefill some milliseconds. As for every
exact method there are hard instances: hundreds of different workloads whose times on both devices are proportional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from policies.mechanism.views import Assignment, LayerView
from policies.parts.assigners import by_tokens
from policies.parts.objective import assignment_of, durations, makespan

Solver = Callable[[Sequence[int], Sequence[int], int, int], list[bool]]
State = tuple[int, int, int]  # T_gpu, T_cpu, bits of the experts that changed sides
Rate = tuple[int, int]  # t_gpu, t_cpu of one expert


def solve(gpu_ns: Sequence[int], cpu_ns: Sequence[int], first_cpu_ns: int, first_gpu_ns: int = 0) -> list[bool]:
    """Which experts to put on the GPU so that ``objective.makespan`` is least. Deterministic; ties are arbitrary."""
    count = len(gpu_ns)
    ratios = [(cpu << 64) // gpu if gpu else cpu << 128 for gpu, cpu in zip(gpu_ns, cpu_ns, strict=True)]
    ranked = sorted(range(count), key=ratios.__getitem__, reverse=True)
    all_gpu, all_cpu = first_gpu_ns + sum(gpu_ns), first_cpu_ns + sum(cpu_ns)
    split = _best_split(gpu_ns, cpu_ns, first_gpu_ns, all_cpu, ranked)
    on_gpu_ns, moved_ns = (sum(times[i] for i in ranked[:split]) for times in (gpu_ns, cpu_ns))
    start = (first_gpu_ns + on_gpu_ns, all_cpu - moved_ns, 0)
    changed = _search(gpu_ns, cpu_ns, ranked, split, start, min(all_gpu, all_cpu + 1))
    if changed is None:
        return [all_gpu <= all_cpu] * count
    on_gpu = [False] * count
    for place, i in enumerate(ranked):
        on_gpu[i] = (place < split) != bool(changed >> i & 1)
    return on_gpu


def _best_split(
    gpu_ns: Sequence[int], cpu_ns: Sequence[int], first_gpu_ns: int, all_cpu: int, ranked: Sequence[int]
) -> int:
    """How many of ``ranked`` to put on the GPU, if they go there in this order."""
    t_gpu, t_cpu = first_gpu_ns, all_cpu
    for place, i in enumerate(ranked):
        if t_gpu + gpu_ns[i] > t_cpu - cpu_ns[i]:
            better = max(t_gpu + gpu_ns[i], t_cpu - cpu_ns[i]) < t_cpu
            return place + better
        t_gpu += gpu_ns[i]
        t_cpu -= cpu_ns[i]
    return len(ranked)


def _search(
    gpu_ns: Sequence[int], cpu_ns: Sequence[int], ranked: Sequence[int], split: int, start: State, best: int
) -> int | None:
    """Bits of the experts that change sides in the best choice below ``best``; None if there is none."""
    answer = None
    if max(start[:2]) < best:
        best, answer = max(start[:2]), 0
    states = [start]
    for i, leaves, leaving, entering in _core(gpu_ns, cpu_ns, ranked, split):
        gpu, cpu = (-gpu_ns[i], cpu_ns[i]) if leaves else (gpu_ns[i], -cpu_ns[i])
        moved = [(g + gpu, c + cpu, bits | 1 << i) for g, c, bits in states]
        for g, c, bits in moved:
            if g < best and c < best:
                best, answer = max(g, c), bits
        states = _promising(sorted(states + moved), best, leaving, entering)
        if not states:
            break
    return answer


def _core(
    gpu_ns: Sequence[int], cpu_ns: Sequence[int], ranked: Sequence[int], split: int
) -> Iterator[tuple[int, bool, Rate | None, Rate | None]]:
    """From the split outwards: an expert, whether it leaves the GPU, and the next to leave and to enter after it."""
    rates = [(gpu_ns[i], cpu_ns[i]) for i in ranked]
    low, high = split - 1, split
    while low >= 0 or high < len(ranked):
        leaves = high >= len(ranked) or (low >= 0 and split - low <= high - split + 1)
        i = ranked[low if leaves else high]
        low, high = (low - 1, high) if leaves else (low, high + 1)
        yield i, leaves, rates[low] if low >= 0 else None, rates[high] if high < len(ranked) else None


def _promising(states: list[State], best: int, leaving: Rate | None, entering: Rate | None) -> list[State]:
    """Undominated states, ascending by T_gpu, whose relaxation beats ``best``.

    Where T_gpu > T_cpu only experts that leave the GPU help, at the ratio of the next one at best; else those that
    enter. With ratio cpu/gpu the two meet at (T_cpu gpu + T_gpu cpu) / (gpu + cpu).
    """
    kept = []
    least_cpu = None
    for state in states:
        t_gpu, t_cpu, _ = state
        if least_cpu is not None and t_cpu >= least_cpu:
            continue
        least_cpu = t_cpu
        rate = leaving if t_gpu > t_cpu else entering
        if rate is None:
            continue
        gpu, cpu = rate
        if t_cpu * gpu + t_gpu * cpu <= (best - 1) * (gpu + cpu):
            kept.append(state)
    return kept


def solve_with_highs(
    gpu_ns: Sequence[int], cpu_ns: Sequence[int], first_cpu_ns: int, first_gpu_ns: int = 0
) -> list[bool]:
    """Solve the assignment with HiGHS (scipy.optimize.milp), without a gap; exact within its tolerance of 1e-6.

    Variables: x_i (expert i on the GPU), y (any expert on the CPU), z (any on the GPU), T; minimise T. Raises
    RuntimeError if HiGHS gives up.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    count = len(gpu_ns)
    rows = np.zeros((2 * count + 2, count + 3))
    rows[0, :count], rows[0, -3:] = gpu_ns, (0, first_gpu_ns, -1.0)  # T_gpu <= T
    rows[1, :count], rows[1, -3:] = -np.asarray(cpu_ns, float), (first_cpu_ns, 0, -1.0)  # T_cpu <= T
    rows[2 : count + 2, :count], rows[2 : count + 2, -3] = -np.eye(count), -1.0  # y >= 1 - x_i
    rows[count + 2 :, :count], rows[count + 2 :, -2] = np.eye(count), -1.0  # z >= x_i
    most = np.array([0.0, -float(sum(cpu_ns)), *[-1.0] * count, *[0.0] * count])
    result = milp(
        np.eye(count + 3)[-1],
        constraints=LinearConstraint(rows, ub=most),
        integrality=np.array([1] * (count + 2) + [0]),
        bounds=Bounds(0, np.array([1.0] * (count + 2) + [np.inf])),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise RuntimeError(f"HiGHS found no assignment of {count} experts: {result.message}")
    return [bool(value > 0.5) for value in result.x[:count]]


SOLVERS: dict[str, Solver] = {"own": solve, "highs": solve_with_highs}


class ExactAssigner:
    """The optimum of the shared objective; ``solver`` "own" or "highs" (the latter minutes slower over a run)."""

    def __init__(self, solver: Literal["own", "highs"] = "own") -> None:
        self._solve = SOLVERS[solver]

    def assign(self, view: LayerView) -> Assignment:
        """Solve the layer; run by descending workload."""
        gpu_ns, cpu_ns = durations(view)
        first = view.costs[view.layer].first_cpu_ns, view.costs[view.layer].first_gpu_ns
        on_gpu = self._solve(gpu_ns, cpu_ns, *first)
        return assignment_of(view, by_tokens(view.routing.tokens), on_gpu, makespan(gpu_ns, cpu_ns, on_gpu, *first))
