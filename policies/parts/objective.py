"""The objective that assigners share: min max(T_cpu, T_gpu) over the active experts (DALI, Section 4.1, Eq. 3-6).

T_gpu and T_cpu are sums over the experts on that device. An expert occupies the GPU for max(transfer, compute): the
transfer is 0 if it is resident, the rest of its copy if that is in flight (our reading: the paper does not say), and a
whole copy if it is absent. The first expert of a layer costs ``first_gpu_ns`` more on the GPU, ``first_cpu_ns`` on the
CPU. Active experts always run somewhere (our reading of Eq. 7). All times are integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.mechanism.shared_dram import rates_together
from policies.mechanism.views import INFINITE_NS, Assignment, ExpertCosts, LayerView


def durations(view: LayerView) -> tuple[list[int], list[int]]:
    """(t_gpu, t_cpu) of every active expert, in the order of ``view.routing.active``."""
    active, tokens = view.routing.active, view.routing.tokens
    costs = view.costs[view.layer]
    gpu_ns, cpu_ns, copy_ns = costs.gpu_ns, costs.cpu_ns, costs.copy_ns
    ready, narrow = view.ready_ns, costs.narrow is not None
    on_gpu = []
    for expert, workload in zip(active, tokens, strict=True):
        if narrow:
            gpu_ns, copy_ns = costs.of(expert).gpu_ns, costs.of(expert).copy_ns
        duration, transfer = gpu_ns[workload], ready[expert]
        if transfer:
            if transfer == INFINITE_NS:
                transfer = copy_ns
            if transfer > duration:
                duration = transfer
        on_gpu.append(duration)
    return on_gpu, [cpu_ns[workload] for workload in tokens]


def makespan(
    gpu_ns: Sequence[int], cpu_ns: Sequence[int], on_gpu: Sequence[bool], first_cpu_ns: int, first_gpu_ns: int = 0
) -> int:
    """max(T_cpu, T_gpu) in ns of a choice: ``on_gpu[i]`` puts expert i, of durations ``gpu_ns[i]``, ``cpu_ns[i]``."""
    t_gpu, t_cpu = first_gpu_ns if True in on_gpu else 0, first_cpu_ns if False in on_gpu else 0
    for chosen, gpu, cpu in zip(on_gpu, gpu_ns, cpu_ns, strict=True):
        if chosen:
            t_gpu += gpu
        else:
            t_cpu += cpu
    return t_gpu if t_gpu > t_cpu else t_cpu


def together(costs: ExpertCosts, cpu_ns: int, read_ns: int, copies_ns: int) -> tuple[int, int]:
    """When the CPU and the link finish, if both begin now and would take ``cpu_ns`` and ``copies_ns`` alone.

    ``read_ns``: what the weights of the CPU's experts take to read (``rates_together``).
    """
    cpu_rate, copy_rate = rates_together(costs, cpu_ns, read_ns)
    cpu_end, copies_end = cpu_ns * 1000 // cpu_rate, copies_ns * 1000 // copy_rate
    if cpu_end <= copies_end:
        return cpu_end, cpu_end + copies_ns - cpu_end * copy_rate // 1000
    return copies_end + cpu_ns - copies_end * cpu_rate // 1000, copies_end


def assignment_of(view: LayerView, order: Sequence[int], on_gpu: Sequence[bool], makespan_ns: int) -> Assignment:
    """The choice as an Assignment. ``order`` holds positions in ``active``, most urgent first; on the GPU, residents
    run before experts that are still being copied."""
    active, ready = view.routing.active, view.ready_ns
    there: list[int] = []
    coming: list[int] = []
    loads: list[int] = []
    cpu: list[int] = []
    for i in order:
        expert = active[i]
        if not on_gpu[i]:
            cpu.append(expert)
        elif not (transfer := ready[expert]):
            there.append(expert)
        else:
            (loads if transfer == INFINITE_NS else coming).append(expert)
    return Assignment((*there, *coming, *loads), tuple(cpu), tuple(loads), makespan_ns)
