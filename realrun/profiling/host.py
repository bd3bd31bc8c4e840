"""Probes of the host: launches on idle lanes.

A launch lasts until the host continues or, on an idle lane, until the work begins: a sleeping thread takes about 20 us
to wake. Other hand-overs are part of ``kernels`` and ``link``. Two parts of a launch overlap with the lane's work
(``sim.timeline.launching``):

- ``launch_lead``: from the first submission of a group until its first work begins.
- ``launch_tail``: from the end of a launch to the end of the work, on a lane without other work. The work is a layer's
  gate, whose few small kernels take a GPU less time than their launches, so that only the last one is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from realrun.machine.lanes import Work, nothing
from realrun.profiling.kernels import Found
from realrun.profiling.lab import Lab
from realrun.profiling.timing import Probe


def host_probes(lab: Lab) -> list[Probe]:
    """The probes of the launches of each group, with one token per step."""
    dense = [dense_launch] if lab.shape.dense_layers else []
    return [partial(probe, lab) for probe in (layer_launch, launch_tail, expert_launch, head_launch, *dense)]


def layer_launch(lab: Lab) -> Found:
    """The launch of attention, gate and shared experts."""
    model, layer, hidden = lab.model, lab.next_layer(), lab.hidden[:1]
    normed: list[Tensor] = []  # as in a run, where it is at the address that recorded graphs read
    shared: list[Work] = [lambda: model.shared(layer, normed[0])] if lab.shape.shared_width else []
    work: list[Work] = [
        lambda: normed.append(model.attention(layer, hidden)[1]), lambda: model.gate(layer, normed[0]), *shared
    ]
    launched = _launched(lab, work)
    return {("launch",): [launched.ns], ("launch_lead",): [launched.lead_ns]}


def launch_tail(lab: Lab) -> Found:
    """The lane's work after a gate has been launched."""
    model, layer, hidden = lab.model, lab.next_layer(), lab.hidden[:1]
    return {("launch_tail",): [_launched(lab, [lambda: model.gate(layer, hidden)]).tail_ns]}


def head_launch(lab: Lab) -> Found:
    """The launch of the language-model head."""
    return {("head_launch",): [_launched(lab, [lambda: lab.model.head(lab.hidden[:1])]).ns]}


def dense_launch(lab: Lab) -> Found:
    """The time that one dense layer adds to its launch."""
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
    """The launch of one expert: the host's time for one that is not a layer's first, and waking the lane for the first.

    If the model has shared experts, the lane is busy with them and awake. Waking counts as the host's time, as in the
    other launches, since a lead is never longer than its launch (``sim.timeline.launching``).
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
    """Times of work that is submitted to an idle lane."""

    ns: int  # from the first submission until the host continues and the first work has begun
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
    """Begin a step of one token, and wait until the lane is idle."""
    lab.machine.gpu.submit(lambda: lab.model.begin_step((1,), (0,))).wait()
