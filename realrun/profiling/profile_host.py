"""Probes of the host: launches on idle lanes.

A launch lasts until the host goes on, or, where the lane was idle, until the work begins: a sleeping thread takes some
20 us to wake. The other hand-overs are counted in ``profile_kernels`` and ``profile_link``.
"""

from __future__ import annotations

from collections.abc import Sequence

from realrun.machine.lanes import Work, nothing
from realrun.profiling.profile_kernels import Found
from realrun.profiling.profile_lab import Lab
from realrun.profiling.profile_timing import Probe


def host_probes(lab: Lab) -> list[Probe]:
    """Launches of each group, one token a step."""
    probes: list[Probe] = [lambda: layer_launch(lab), lambda: expert_launch(lab), lambda: head_launch(lab)]
    return [*probes, lambda: dense_launch(lab)] if lab.shape.dense_layers else probes


def layer_launch(lab: Lab) -> Found:
    """Attention, gate and shared experts."""
    model, layer, hidden = lab.model, lab.next_layer(), lab.hidden[:1]
    shared: list[Work] = [lambda: model.shared(layer, hidden)] if lab.shape.shared_width else []
    work: list[Work] = [lambda: model.attention(layer, hidden), lambda: model.gate(layer, hidden), *shared]
    return {("launch",): [_launched(lab, work)]}


def head_launch(lab: Lab) -> Found:
    """The language-model head."""
    return {("head_launch",): [_launched(lab, [lambda: lab.model.head(lab.hidden[:1])])]}


def dense_launch(lab: Lab) -> Found:
    """What one dense layer adds to the launch that it is a part of."""
    _one_token(lab)
    hidden, lane, times = lab.hidden[:1], lab.machine.gpu, []
    for work in (nothing, lambda: lab.model.dense(hidden)):
        lab.cover()
        began = lab.machine.now_ns()
        mark = lane.submit(work)
        times.append(lab.machine.now_ns() - began)
        mark.wait()
    return {("dense_launch",): [max(0, times[1] - times[0]) / lab.shape.dense_layers]}


def expert_launch(lab: Lab) -> Found:
    """One expert: the host's time for one that is not a layer's first, and the waking of the lane by the first.

    Where the model has shared experts, the lane is at work on them, and need not be woken.
    """
    layer, experts = lab.next_experts(2)
    alike = lab.alike(experts, 1)
    before = lab.machine.gpu.submit(lambda: lab.model.shared(layer, lab.hidden[:1])) if lab.shape.shared_width else None
    lab.start(alike, layer, gpu=experts)
    spans = lab.spans()
    first, second = (span for span in spans if span.lane == "host")
    computed = next(span for span in spans if span.lane == "gpu")
    waking_ns = max(0, computed.start_ns - max(first.end_ns, before.end_ns if before else 0))
    return {("expert_launch",): [second.end_ns - second.start_ns + waking_ns]}


def _launched(lab: Lab, works: Sequence[Work]) -> int:
    """From the first submission until the host goes on and the first work has begun."""
    _one_token(lab)
    began = lab.machine.now_ns()
    marks = [lab.machine.gpu.submit(work) for work in works]
    ended = lab.machine.now_ns()
    marks[-1].wait()
    return max(ended, marks[0].start_ns) - began


def _one_token(lab: Lab) -> None:
    """The step of the launches, and an idle lane."""
    lab.machine.gpu.submit(lambda: lab.model.begin_step((1,), (0,))).wait()
