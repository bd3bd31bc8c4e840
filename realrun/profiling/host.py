"""Probes of the host: launches on idle lanes.

A launch lasts until the host goes on, or, where the lane was idle, until the work begins: a sleeping thread takes some
20 us to wake. The other hand-overs are counted in ``kernels`` and ``link``. What of a launch the lane
works under (``sim.engine.launching``):

- ``launch_lead``: from the first submission of a group until its first work begins.
- ``launch_tail``: from the end of a launch to the end of the work, where the lane has nothing else to do. The work is a
  layer's gate: its few small kernels take a GPU less time than their launches, so that only the last one is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from realrun.machine.lanes import Work, nothing
from realrun.profiling.kernels import Found
from realrun.profiling.lab import Lab
from realrun.profiling.timing import Probe


def host_probes(lab: Lab) -> list[Probe]:
    """Launches of each group, one token a step."""
    probes: list[Probe] = [
        lambda: layer_launch(lab), lambda: launch_tail(lab), lambda: expert_launch(lab), lambda: head_launch(lab)
    ]  # fmt: skip
    return [*probes, lambda: dense_launch(lab)] if lab.shape.dense_layers else probes


def layer_launch(lab: Lab) -> Found:
    """Attention, gate and shared experts."""
    model, layer, hidden = lab.model, lab.next_layer(), lab.hidden[:1]
    normed: list[Tensor] = []  # as in a run, where recorded graphs find it where they read it
    shared: list[Work] = [lambda: model.shared(layer, normed[0])] if lab.shape.shared_width else []
    work: list[Work] = [
        lambda: normed.append(model.attention(layer, hidden)[1]), lambda: model.gate(layer, normed[0]), *shared
    ]  # fmt: skip
    launched = _launched(lab, work)
    return {("launch",): [launched.ns], ("launch_lead",): [launched.lead_ns]}


def launch_tail(lab: Lab) -> Found:
    """What is left for the lane once a gate has been launched."""
    model, layer, hidden = lab.model, lab.next_layer(), lab.hidden[:1]
    return {("launch_tail",): [_launched(lab, [lambda: model.gate(layer, hidden)]).tail_ns]}


def head_launch(lab: Lab) -> Found:
    """The language-model head."""
    return {("head_launch",): [_launched(lab, [lambda: lab.model.head(lab.hidden[:1])]).ns]}


def dense_launch(lab: Lab) -> Found:
    """What one dense layer adds to the launch that it is a part of."""
    _one_token(lab)
    hidden, lane, times = lab.hidden[:1], lab.machine.gpu, []
    for work in (nothing, lambda: lab.model.dense(hidden)):
        lab.cover()
        began = lab.machine.now_ns()
        completion = lane.submit(work)
        times.append(lab.machine.now_ns() - began)
        completion.wait()
    return {("dense_launch",): [max(0, times[1] - times[0]) / lab.shape.dense_layers]}


def expert_launch(lab: Lab) -> Found:
    """One expert: the host's time for one that is not a layer's first, and the waking of the lane by the first.

    Where the model has shared experts, the lane is at work on them, and need not be woken. The waking counts as the
    host's time, as in the other launches, since a lead is never longer than its launch (``sim.engine.launching``).
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


class _Launched(NamedTuple):
    """Of works submitted to an idle lane."""

    ns: int  # from the first submission until the host goes on and the first work has begun
    lead_ns: int  # until the first work has begun
    tail_ns: int  # from the last submission's end to that of the last work


def _launched(lab: Lab, works: Sequence[Work]) -> _Launched:
    _one_token(lab)
    began = lab.machine.now_ns()
    completions = [lab.machine.gpu.submit(work) for work in works]
    ended = lab.machine.now_ns()
    completions[-1].wait()
    starts, ends = max(began, completions[0].start_ns), completions[-1].end_ns
    return _Launched(max(ended, starts) - began, starts - began, max(0, ends - ended))


def _one_token(lab: Lab) -> None:
    """The step of the launches, and an idle lane."""
    lab.machine.gpu.submit(lambda: lab.model.begin_step((1,), (0,))).wait()
