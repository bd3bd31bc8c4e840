"""Laws 2 and 5 (docs/design.md) between host and GPU: what is launched when, and how long the GPU has it.

Told by the rule alone (sim/timeline/gpu_lane.py): a span does not start before its launch's lead is over, nor end
before its tail, and the GPU has it no longer than that asks for.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, StepCosts
from sim.runs.spans import Span
from trilane.testing.log import Layer, Log, Spans, log_of


def law_2_launches(spans: Spans, costs: CostTable) -> None:
    """No GPU span starts before its first kernel can run, nor ends before its last one is launched and has run."""
    log = log_of(spans)
    for layer, span in _on_gpu(log):
        first, end = first_ns(launch_of(log, layer, span), costs), min(_ends(log, layer, span, costs))
        assert first <= span.start_ns, f"law 2: the first kernel can run at {first} ns, of {span}"
        assert end <= span.end_ns, f"law 2: the last kernel has been launched and has run at {end} ns, of {span}"


def law_5_launches(spans: Spans, costs: CostTable) -> None:
    """The GPU is done with a span as soon as its own time is over and its last kernel has been launched and has run.

    Where copies or CPU experts slow it down, that may be later: at most as late as if they did so throughout.
    """
    log = log_of(spans)
    for layer, span in _on_gpu(log):
        soonest, latest = _ends(log, layer, span, costs), _ends(log, layer, span, costs, _slowed_throughout)
        done = any(first <= span.end_ns <= last for first, last in zip(soonest, latest, strict=True))
        assert done, f"law 5: the GPU could be done at {soonest} ns, and at {latest} ns at the latest, with {span}"


def launch_of(log: Log, layer: Layer, span: Span) -> Span:
    """The launch of the group that a span of the GPU belongs to."""
    if span.kind == "expert":
        return next(s for s in log.of(layer, "launch") if s.expert == span.expert)
    launches = log.launches(layer)
    if span.kind == "combine":
        return launches[1]
    if span.layer < 0 and span.kind != "draft":
        return launches[-1]  # of the head
    if span.kind == "speculate":
        place = log.of(layer, "speculate")[::-1].index(span)
        return launches[-1 - place if place < len(launches) - 2 else 0]  # those from a partial forward pass come last
    return launches[0]


def first_ns(launch: Span, costs: CostTable | None) -> int:
    """Time at which the GPU can start on the launched work; without costs, at which all of it has been launched."""
    launch_ns = launch.end_ns - launch.start_ns
    return launch.start_ns + (costs.lead_of(launch_ns) if costs else launch_ns)


def _on_gpu(log: Log) -> list[tuple[Layer, Span]]:
    return [((span.step, span.layer), span) for span in log.lanes["gpu"]]


def _ends(
    log: Log, layer: Layer, span: Span, costs: CostTable, taken_ns: Callable[[int, CostTable], int] = lambda ns, _: ns
) -> list[int]:
    """Times at which a span can have ended: several, where it does not say of which kind it is.

    ``taken_ns``: GPU time of work, from its time alone.
    """
    launched = launch_of(log, layer, span).end_ns - _launched_later_ns(log, layer, span, costs)
    return [
        max(span.start_ns + taken_ns(own_ns, costs), launched + min(costs.tail_ns, own_ns))
        for own_ns in _own_times(log, layer, span, costs)
    ]


def _slowed_throughout(own_ns: int, costs: CostTable) -> int:
    """GPU time of work that copies and CPU experts slow down throughout, rounded up."""
    return -(-own_ns * 10**6 // (costs.gpu_permille * costs.gpu_with_cpu_permille))


def _launched_later_ns(log: Log, layer: Layer, span: Span, costs: CostTable) -> int:
    """Host time of launching the kernels of the group that come after those of this span."""
    if span.layer < 0 or span.kind == "shared" or _alone(log, layer, span):
        return 0
    return costs.shared_launch_ns + (costs.gate_launch_ns if span.kind == "attention" else 0)


def _alone(log: Log, layer: Layer, span: Span) -> bool:
    """True if a span has a launch of its own: not the layer's first, which is for attention, gate and so on."""
    return launch_of(log, layer, span) != log.of(layer, "launch")[0]


def _own_times(log: Log, layer: Layer, span: Span, costs: CostTable) -> list[int]:
    """GPU times that a span alone can take."""
    step: StepCosts = costs.step(span.tokens, (1,))
    match span.kind:
        case "attention":
            return [step.head_ns if span.layer < 0 else step.attention_ns + (step.dense_ns if span.layer == 0 else 0)]
        case "speculate":
            partial = _alone(log, layer, span)
            return [step.attention_ns + step.speculate_ns] if partial else [step.speculate_ns, step.estimator_ns]
        case "expert":
            expert = costs.experts[span.layer].of(span.expert)
            return [expert.gpu_ns[span.tokens] + extra_ns for extra_ns in _extra_times(log, layer, span, expert)]
        case "draft":
            return [span.tokens * costs.draft_costs(1).gpu_ns]
        case "combine":
            read = costs.result_path == "direct" and bool(log.joining(layer))
            return [step.combine_ns + (step.result_ns if read else 0)]
        case kind:
            return [getattr(step, f"{kind}_ns")]


def _extra_times(log: Log, layer: Layer, span: Span, costs: ExpertCosts) -> list[int]:
    """GPU times that an expert can take for kernels that others share: all if it came first, or after the plan; all or
    nothing in the very ns in which the plan took effect.
    """
    first, planned = log.of(layer, "expert", lane="gpu")[0], log.planned(layer)
    copied = [copy.end_ns for copy in log.copied.get((span.layer, span.expert), ())]
    came_ns = max([end_ns for end_ns in copied if end_ns <= span.start_ns], default=0)
    if span == first or came_ns > planned:
        return [costs.first_gpu_ns]
    return [0, costs.first_gpu_ns] if came_ns == planned else [0]
