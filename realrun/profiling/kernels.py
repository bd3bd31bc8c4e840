"""Probes of kernels, of their launches, and of copies: attention, gate and others by the sizes of a step, experts by
their tokens.

This defines the measurement for each span of the simulator (``sim.runs.spans``). The hand-over between threads or
streams also takes time, and is counted once, with the work that it delays:

- attention, gate, speculate, shared, combine, expert on the GPU: from start to end, in a queue that is not empty.
- ``routing``: from the gate's end until the ids are readable on the host.
- ``sync``: from then until the host has sorted the tokens by expert and sent the lists to the GPU.
- ``activations``: from the host's decision until the CPU lane begins its first expert.
- ``first_cpu_expert``: the additional time of the first expert on an idle CPU lane.
- ``result``: from the end of the last CPU expert to the end of the sum, less the sum itself (results read in place), or
  until the results have been copied over the link.

A launch on an idle lane lasts until the host continues or, if later, until the work begins: a sleeping thread takes
about 20 us to wake. Two parts of a launch overlap with the lane's work (``sim.timeline``):

- ``launch_lead``: from the first submission of a group until its first work begins.
- ``launch_tail``: from the end of a launch to the end of the work, on a lane without other work. The work is a layer's
  gate, whose few small kernels take a GPU less time than their launches, so that only the last one is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from torch import Tensor

from realrun.execution.routed_tokens import routed
from realrun.machine.lanes import Completion, Work, nothing, took_ns
from realrun.profiling.lab import COVER_NS, Lab
from realrun.profiling.timing import Key, Probe
from realrun.replay.replay import WEIGHTS_DTYPE

FORECASTS = ("speculate", "estimator")
Found = Mapping[Key, Sequence[float]]


def kernel_probes(lab: Lab) -> list[Probe]:
    """Probes for all sizes of the lab's points."""
    points = lab.points
    most = max(points.batches)
    return [
        *(partial(decode, lab, batch, context) for batch in points.batches for context in points.contexts),
        *(partial(prefill, lab, batch, prompt) for batch in points.batches for prompt in points.prompts),
        *(partial(decode, lab, batch, points.contexts[0], kind) for batch in points.batches for kind in FORECASTS),
        *(partial(prefill, lab, most, prompt, kind) for prompt in points.prompts for kind in FORECASTS),
        *(partial(gpu_experts, lab, tokens) for tokens in points.tokens),
        *(partial(cpu_experts, lab, tokens) for tokens in points.tokens),
        *(partial(head, lab, batch) for batch in points.batches),
    ]


def decode(lab: Lab, batch: int, context: int, forecast: str = "") -> Found:
    """A step with one new token for each sequence; ``context`` includes it."""
    return _layer(lab, (1,) * batch, (context - 1,) * batch, ("attention_decode", batch, context), forecast)


def prefill(lab: Lab, batch: int, prompt: int, forecast: str = "") -> Found:
    """A step with ``prompt`` new tokens for each sequence, without earlier context."""
    return _layer(lab, (prompt,) * batch, (0,) * batch, ("attention_prefill", batch, prompt), forecast)


def _layer(lab: Lab, new: tuple[int, ...], earlier: tuple[int, ...], attention: Key, forecast: str) -> Found:
    """A layer without its routed experts, launched as in a replay; with a ``forecast``, only that is measured.

    A forecast is computed while the host reads the routing; on host lanes, the two slow each other down.
    """
    tokens = sum(new)
    gpu, model, layer, hidden = lab.machine.gpu, lab.model, lab.next_layer(), lab.hidden[:tokens]
    ids, weights = lab.drawn(tokens)
    normed: list[Tensor] = []
    chosen: list[Tensor] = []
    gpu.submit(lambda: model.begin_step(new, earlier))
    lab.cover()
    completions = {attention: gpu.submit(lambda: normed.append(model.attention(layer, hidden)[1]))}
    gated = completions["gate", tokens] = gpu.submit(lambda: chosen.append(model.gate(layer, *normed)[0]))
    if forecast:
        forecast_by = model.estimate if forecast == "estimator" else model.speculate
        completions[forecast, tokens] = gpu.submit(lambda: forecast_by(layer, *normed))
    if lab.shape.shared_width:
        completions["shared", tokens] = gpu.submit(lambda: model.shared(layer, *normed))
    copied = lab.machine.d2h.submit(lambda: lab.chosen_on_host[:tokens].copy_(chosen[0], non_blocking=True), (gated,))
    copied.wait()
    sorted_by_expert = routed(ids, weights)
    sync_ns = lab.machine.now_ns() - copied.end_ns + lab.start(sorted_by_expert, layer)
    if lab.shape.dense_layers and not forecast:
        completions["dense_ffn", tokens] = gpu.submit(lambda: model.dense_ffn(hidden))
    times_ns: dict[Key, Sequence[float]] = {key: [took_ns(completion)] for key, completion in completions.items()}
    if forecast:
        return {(forecast, tokens): times_ns[forecast, tokens]}
    times_ns["routing", tokens] = [copied.end_ns - gated.end_ns]
    if len(new) == tokens:  # a decode step
        times_ns["sync",] = [sync_ns]
    return times_ns


def gpu_experts(lab: Lab, tokens: int) -> Found:
    """Consecutive experts on the GPU, and the sum."""
    layer, experts = lab.next_experts(lab.at_once)
    alike = lab.alike(experts, tokens)
    lab.cover()
    lab.start(alike, layer, gpu=experts)
    began_ns = lab.machine.now_ns()
    lab.combine(tokens)
    launched_ns = lab.machine.now_ns() - began_ns
    spans = lab.spans()
    computed = [span.end_ns - span.start_ns for span in spans if (span.lane, span.kind) == ("gpu", "expert")]
    summed = [span.end_ns - span.start_ns for span in spans if span.kind == "combine"]
    launch: Found = {("combine_launch",): [launched_ns]} if tokens in lab.points.batches else {}
    return {("expert_gpu", tokens): computed, ("combine", tokens): summed, **launch}


def cpu_experts(lab: Lab, tokens: int) -> Found:
    """Consecutive experts on an idle CPU, and the sum that waits for them."""
    layer, experts = lab.next_experts(lab.at_once)
    alike = lab.alike(experts, tokens)
    lab.cover().wait()  # about as long as the CPU is idle in a layer
    lab.start(alike, layer, cpu=experts)
    lab.combine(tokens)
    spans = lab.spans()
    computed = [span for span in spans if span.lane == "cpu"]
    [sent] = [span for span in spans if span.kind == "activations"]
    times_ns = [span.end_ns - span.start_ns for span in computed]
    first: Found = {("first_cpu_expert",): [max(0, times_ns[0] - median(times_ns[1:]))]} if tokens == 1 else {}
    way: Key = ("result" if lab.machine.result_path == "h2d" else "result_and_combine", tokens)
    read = next(span for span in spans if span.kind == ("result" if way[0] == "result" else "combine"))
    return {
        ("expert_cpu", tokens): times_ns[1:], **first,
        ("activations", tokens): [computed[0].start_ns - sent.ready_ns],
        way: [read.end_ns - computed[-1].end_ns],
    }


def head(lab: Lab, batch: int) -> Found:
    """The language-model head on one row of every sequence."""
    gpu, model = lab.machine.gpu, lab.model
    gpu.submit(lambda: model.begin_step((1,) * batch, (0,) * batch))
    lab.cover()
    return {("head", batch): [took_ns(gpu.submit(lambda: model.head(lab.hidden[:batch])))]}


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
        began_ns = lab.machine.now_ns()
        completion = lane.submit(work)
        times.append(lab.machine.now_ns() - began_ns)
        completion.wait()
    return {("dense_launch",): [max(0, times[1] - times[0]) / lab.shape.dense_layers]}


def expert_launch(lab: Lab) -> Found:
    """The launch of one expert: the host's time for one that is not a layer's first, and waking the lane for the first.

    If the model has shared experts, the lane is busy with them and awake. Waking counts as the host's time, as in the
    other launches, since a lead is never longer than its launch (``sim.timeline``).
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
    began_ns = lab.machine.now_ns()
    completions = [lab.machine.gpu.submit(work) for work in works]
    launched_ns = lab.machine.now_ns()
    completions[-1].wait()
    start_ns, end_ns = max(began_ns, completions[0].start_ns), completions[-1].end_ns
    return _Launched(max(launched_ns, start_ns) - began_ns, start_ns - began_ns, max(0, end_ns - launched_ns))


def _one_token(lab: Lab) -> None:
    """Begin a step of one token, and wait until the lane is idle."""
    lab.machine.gpu.submit(lambda: lab.model.begin_step((1,), (0,))).wait()


# --- copies -----------------------------------------------------------------------------------------------------------


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
