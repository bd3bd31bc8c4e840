"""Probes of copies: experts through the executor's copy thread, experts written back, all lanes together, and the CPU's
results that the GPU reads over a busy link.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from realrun.machine.lanes import Completion, nothing, took_ns
from realrun.profiling.kernels import Found
from realrun.profiling.lab import COVER_NS, Lab
from realrun.profiling.timing import Probe
from realrun.replay.replay import WEIGHTS_DTYPE

BURST = 4  # copies of a layer that loads several experts
STEADY_COPIES = 6  # during which experts are computed
COPIES_OF_RESULTS = 4  # bytes copied while results are read, in bytes of these


def link_probes(lab: Lab) -> list[Probe]:
    """Experts over the link and back, alone and next to the CPU; results over the link, alone and next to copies."""
    probes: list[Probe] = [partial(probe, lab) for probe in (copies, writeback, contention)]
    if lab.machine.result_path == "h2d":  # results queue behind copies, so they are never read next to one
        return probes
    return [*probes, *(partial(busy_results, lab, tokens) for tokens in lab.points.batches)]


def busy_results(lab: Lab, tokens: int) -> Found:
    """The sum that reads the CPU's results in place, launched on an idle GPU: with an idle link, and during copies.

    The additional time during copies is only printed; simulated sums take the time with an idle link.
    """
    idle: Found = {("sum_of_results_ns", tokens): [_sum_ns(lab, tokens, 0)]}
    result_bytes = tokens * lab.at_once * lab.shape.hidden * WEIGHTS_DTYPE.itemsize
    experts = -(-COPIES_OF_RESULTS * result_bytes // lab.layout.size_bytes)
    many = min(max(BURST, experts), lab.layers * lab.experts)
    return {**idle, ("sum_of_results_beside_copies_ns", tokens): [_sum_ns(lab, tokens, many)]}


def _sum_ns(lab: Lab, tokens: int, copies: int) -> int:
    """The time of the sum of results that the CPU has computed, after the first of ``copies`` has begun."""
    layer, experts = lab.next_experts(lab.at_once)
    lab.start(lab.alike(experts, tokens), layer, cpu=experts)
    lab.machine.cpu.submit(nothing).wait()
    futures = lab.ask_for(copies)
    for future in futures[:1]:
        future.issued()
    lab.combine(tokens)
    for future in futures:
        future.wait_known()
    [summed] = [span for span in lab.spans() if span.kind == "combine"]
    return summed.end_ns - summed.start_ns


def copies(lab: Lab) -> Found:
    """An expert's share of a burst of copies: from the demand to the start of the GPU work that waits for the last one.

    This includes the notification of the copy thread, the time between copies, and the notification of the GPU.
    """
    began_ns = lab.machine.now_ns()
    futures = lab.ask_for(BURST)
    waiting = [lab.machine.gpu.submit(nothing, (future,)) for future in futures]
    waiting[-1].wait()
    for future in futures:
        future.wait_known()
    _forget_spans(lab)
    return {("copy",): [(waiting[-1].start_ns - began_ns) / BURST]}


def writeback(lab: Lab) -> Found:
    """One expert from the GPU to scratch memory of the host, on an idle lane."""
    layer, [expert] = lab.next_experts(1)
    target, source = lab.scratch, lab.arena[layer, expert]
    completion = lab.machine.back.submit(lambda: target.copy_(source, non_blocking=True))
    completion.wait()
    return {("writeback",): [completion.end_ns - completion.ready_ns]}


# --- together ---------------------------------------------------------------------------------------------------------


def contention(lab: Lab) -> Found:
    """Rates of lanes that work together, in permille of the rate of each alone: CPU experts and copies, GPU experts and
    copies, GPU and CPU experts, and all three.

    Consecutive experts of one token run during consecutive copies, which begin before the first expert and end about
    when the last one does.
    """
    copy_ns, cpu_ns, gpu_ns = _copies_alone(lab), _alone(lab, "cpu"), _alone(lab, "gpu")
    many = max(8, round(STEADY_COPIES * copy_ns / max(cpu_ns, 1)))
    both = _together(lab, many, ("cpu",), round(2 * many * cpu_ns / max(copy_ns, 1)) + 2)
    beside_copies = _together(lab, many, ("gpu",), round(2 * many * gpu_ns / max(copy_ns, 1)) + 2)
    experts = {"cpu": cpu_ns, "gpu": gpu_ns}  # a real GPU shares neither cores nor memory with the CPU
    if lab.machine.kind == "host-lanes":
        experts = _together(lab, many, ("cpu", "gpu"), 0)
    three = _together(lab, many, ("cpu", "gpu"), round(2 * many * cpu_ns / max(copy_ns, 1)) + 2)
    return {
        ("cpu_permille",): [1000 * cpu_ns / both["cpu"]],
        ("copy_permille",): [1000 * copy_ns / both["h2d"]],
        ("gpu_permille",): [1000 * gpu_ns / beside_copies["gpu"]],
        ("gpu_with_cpu_permille",): [1000 * gpu_ns / experts["gpu"]],
        ("cpu_with_gpu_permille",): [1000 * cpu_ns / experts["cpu"]],
        ("gpu_beside_both_permille",): [1000 * gpu_ns / three["gpu"]],
        ("cpu_beside_both_permille",): [1000 * cpu_ns / three["cpu"]],
        ("copy_beside_both_permille",): [1000 * copy_ns / three["h2d"]],
    }


def _together(lab: Lab, many: int, lanes: Sequence[str], copies: int) -> dict[str, float]:
    """Median ns of an expert of each lane, and of a copy if there are any, while all are at work."""
    covered = round(COVER_NS / lab.script.cost.copy_ns) if copies and "gpu" in lanes else 0
    futures = lab.ask_for(min(copies + covered, lab.layers * lab.experts))
    for future in futures[:1]:
        future.issued()
    if "gpu" in lanes:
        lab.cover()
    completions: dict[str, list[Completion]] = {lane: [] for lane in lanes}
    for _ in range(many):
        for lane in lanes:
            completions[lane].append(_expert_on(lab, lane))
    for future in futures:
        future.wait_known()
    for queue in completions.values():
        queue[-1].wait()
    if futures:
        completions["h2d"] = [future.issued() for future in futures]
    begin_ns = max(queue[1].start_ns for queue in completions.values())  # the first on an idle lane takes longer
    end_ns = min(queue[-1].end_ns for queue in completions.values())
    _forget_spans(lab)
    medians_ns: dict[str, float] = {}
    for lane, queue in completions.items():  # work that ran entirely within the interval; all, if there is none
        within = [work for work in queue if begin_ns <= work.start_ns and work.end_ns <= end_ns]
        medians_ns[lane] = median(map(took_ns, within or queue))
    return medians_ns


def _copies_alone(lab: Lab) -> float:
    futures = lab.ask_for(BURST)
    for future in futures:
        future.wait_known()
    _forget_spans(lab)
    return median(map(took_ns, futures))


def _alone(lab: Lab, lane: str) -> float:
    if lane == "gpu":
        lab.cover()  # so that what is launched runs without a gap
    completions = [_expert_on(lab, lane) for _ in range(8)]
    completions[-1].wait()
    return median(map(took_ns, completions[1:]))


def _expert_on(lab: Lab, lane: str) -> Completion:
    """Submit one expert of one token, in turn from all experts."""
    if lane == "gpu":
        return lab.machine.gpu.submit(lab.expert_work(lab.arena))
    return lab.machine.cpu.submit(lab.expert_work(lab.memory))


def _forget_spans(lab: Lab) -> None:
    lab.recorder.flush()
    lab.recorder.rows = []
