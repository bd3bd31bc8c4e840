"""Law 5 (docs/design.md): no lane is idle while its next piece of work is ready.

Spans alone do not show when a background copy (a swap, a prefetch) was requested, nor what was protected meanwhile; the
recording session does. Moments are taken from the spans: a plan's start, a foresight's end, the end of a layer or step.

Between host and GPU, laws 2 and 5 follow from the rule alone (sim/timeline/gpu_lane.py): a span does not start before
its launch's lead is over, nor end before its tail, and the GPU has it no longer than that asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from policies.mechanism.views import ExpertCosts, ExpertId, Upload
from sim.costs.cost_table import CostTable, StepCosts
from sim.runs.spans import Span
from trilane.testing.log import NEVER, Layer, Log, Spans, Stay, home, log_of
from trilane.testing.pools import call_of
from trilane.testing.worlds import RecordingSession


def law_5_work_conservation(spans: Spans, demand_slots: int | None = None, costs: CostTable | None = None) -> None:
    """No lane is idle while its next piece of work is ready; ``ready_ns`` is what the dependencies say.

    ``demand_slots``: staging slots for demand loads; the link may rest while all of them hold experts. ``costs``: the
    world's; without them the GPU is taken to start when a launch has ended.
    """
    log = log_of(spans)
    if costs is not None:
        law_5_launches(log.spans, costs)
    for lane in log.lanes:
        for free, span in log.transfers() if lane == "h2d" else log.in_order(lane):
            assert span.start_ns == max(free, span.ready_ns), (
                f"law 5: {lane} is free at {free} ns, its next work is ready at {span.ready_ns}, but starts at "
                f"{span.start_ns}: {span}"
            )
    for layer in log.routed_layers():
        for span in log.layers[layer]:
            expected = _ready(log, layer, span, costs)
            assert expected is None or span.ready_ns == expected, f"law 5: {span} could have started at {expected} ns"
        _arrival_order(log, layer)
    _link_serves_demand(log, demand_slots)


def _ready(log: Log, layer: Layer, span: Span, costs: CostTable | None) -> int | None:
    """Time in ns at which the inputs of a span were complete; None if it has none but the span before it."""
    match span.lane, span.kind:
        case "gpu", _:
            return _ready_on_gpu(log, layer, span, costs)
        case "host", _:
            return _ready_on_host(log, layer, span)
        case "d2h", "routing":
            return _end_of_forecast(log, layer, span) if span.target_layer >= 0 else _end(log, layer, "gate")
        case "d2h", "activations":
            own = log.of(layer, "expert", "deferred", lane="cpu")
            return max(_end(log, layer, "attention"), _end(log, layer, "plan" if own else "foresee"))
        case "cpu", "precompute" | "gate_up" if span.target_layer >= 0:
            return max(_end(log, layer, "activations", "foresee"), _read_by(log, span))
        case "cpu", "expert" | "deferred" | "gate_up":
            return max(_end(log, layer, "activations"), _read_by(log, span))
        case "h2d", "result":
            return max([_end(log, layer, "plan"), *(s.end_ns for s in log.joining(layer))])
    return None


def _read_by(log: Log, span: Span) -> int:
    """Time in ns from which on the host holds the expert that a span reads there; 0 where there is no disk."""
    stay = log.held_by_host(span)
    return 0 if stay is None else stay.readable


def _ready_on_gpu(log: Log, layer: Layer, span: Span, costs: CostTable | None) -> int | None:
    match span.kind:
        case "attention" | "gate" | "speculate" | "shared":
            return first_ns(launch_of(log, layer, span), costs)
        case "expert":
            call = call_of(log, layer, span) if costs is not None and costs.kernel_copies else []
            there = max(_stay_at(log, layer, each).readable for each in (span, *call))
            return max(first_ns(launch_of(log, layer, span), costs), there)
        case "combine":
            parts = log.of(layer, "result") or log.joining(layer)
            used = {s.expert for s in log.computed(layer)}
            streamed = [s for s in log.demanded(layer) if s.expert not in used]
            return max([first_ns(log.launches(layer)[1], costs), *(s.end_ns for s in [*parts, *streamed])])
    return None


def _ready_on_host(log: Log, layer: Layer, span: Span) -> int | None:
    step, place = layer
    match span.kind:
        case "wait" if span.target_layer >= 0:
            return _end(log, layer, "routing")
        case "wait":
            return log.of(layer, "routing")[0].end_ns
        case "plan" if log.committed(layer):
            return max(log.launches(layer)[0].end_ns, log.ended((step, place - 1)))  # when the layer is at work
        case "plan":
            return min(s.end_ns for s in log.of(layer, "wait"))
        case "foresee":
            return _forecast_read(log, layer, span)
        case "program":
            before = (step, place - 1) if place > 0 else (step - 1, -1)
            if before not in log.layers:
                return None
            return span.ready_ns if place == 0 and _link_ended_at(log, span.ready_ns) else log.ended(before)
        case "observe":
            return _end(log, layer, "plan")
        case "launch" if span is not log.launches(layer)[0]:
            return _end(log, layer, "plan")
    return None


def _link_ended_at(log: Log, time_ns: int) -> bool:
    """True if a transfer ended then, for which a policy may wait between two steps (``law_2_swaps`` says whether)."""
    return any(s.end_ns == time_ns for s in (*log.lanes["h2d"], *log.lanes["d2h"]) if s.kind != "routing")


def _forecast_read(log: Log, layer: Layer, span: Span) -> int | None:
    """Time at which the host has read the forecasts; None in a committed layer whose forecasts are not the GPU's."""
    waited = [s for s in log.of(layer, "wait") if s.target_layer >= 0]
    late = len(log.launches(layer)) > 2 or log.committed(layer)  # a forecast that comes by itself is waited for
    assert bool(waited) == (late and bool(log.of(layer, "speculate"))), f"law 2: {span} has waited for {waited}"
    if waited:
        return waited[0].end_ns
    return _end(log, layer, "routing") if log.of(layer, "routing") else None


def _end_of_forecast(log: Log, layer: Layer, span: Span) -> int:
    """Time in ns at which what ``span`` copies was computed: forecasts, of which the late have a copy of their own."""
    made = log.of(layer, "speculate")
    copies = [s for s in log.of(layer, "routing") if s.target_layer >= 0]
    if len(copies) == 2 and span is copies[0]:
        made = made[: len(made) - len(log.launches(layer)) + 2]
    return max(s.end_ns for s in made)


def _end(log: Log, layer: Layer, *kinds: str) -> int:
    return max(s.end_ns for s in log.of(layer, *kinds))


def _stay_at(log: Log, layer: Layer, span: Span) -> Stay:
    return next(s for s in reversed(log.stays[layer[1], span.expert]) if s.readable <= span.start_ns)


def _arrival_order(log: Log, layer: Layer) -> None:
    """The stream runs what was there first, then what arrives in its order."""
    routed = log.routed(layer)
    arrivals = [_stay_at(log, layer, s).readable for s in log.of(layer, "expert", lane="gpu")]
    waited = [max(time, routed) for time in arrivals]
    assert waited == sorted(waited), f"law 5: step, layer {layer}: experts that arrived at {arrivals} ran in this order"


def _link_serves_demand(log: Log, demand_slots: int | None) -> None:
    """Between its plan and the start of a demand load the link idles only for lack of a staging slot."""
    staged = log.staged("demand")
    made = {span.start_ns: free for free, span in log.in_order("gpu") if span.kind == "fetch"}
    for free, span in log.transfers():
        if span.kind != "demand":
            continue
        idle_from = max(
            free, log.planned((span.step, home(span))), made.get(span.start_ns, 0), _read_by(log, span)
        )
        if span.start_ns <= idle_from:
            continue
        own = next(s for s in log.stays[home(span), span.expert] if s.copy is span)
        holders = [s for s in staged if s.came <= idle_from and s.left >= span.start_ns and s is not own]
        full = own.leaving == "release" and len(holders) >= (demand_slots or 1)
        assert full, (
            f"law 5: h2d rests from {idle_from} to {span.start_ns} ns although the demand load of layer {home(span)}, "
            f"expert {span.expert} waits and {len(holders)} staging slots are taken"
        )


# --- background copies ------------------------------------------------------------------------------------------------

Interval = tuple[int, int]


def law_5_background_copies(spans: Spans, session: RecordingSession) -> None:
    """Between the moment at which it could start and its start, something stands in the way of each such copy."""
    log = log_of(spans)
    protected = _protections(log, session)
    swaps_wanted = [(_moment(log, place, when), swap) for place, when, swaps in session.swaps_asked for swap in swaps]
    foreseen = [(log.one(place, "foresee").end_ns, foresight) for place, foresight in session.foresights.items()]
    for free, span in log.transfers():
        key = ExpertId(span.layer, span.expert)
        if span.kind == "swap":
            wanted, swap = max(p for p in swaps_wanted if p[0] <= span.start_ns and p[1].incoming == key)
            in_the_way = [(s.readable, s.left) for s in log.stays[key] if s.leaving == "release"]
            if isinstance(swap, Upload):
                in_the_way += _refused(log, session, max(free, wanted), span)
            else:
                in_the_way += _pinned(log, session, swap.outgoing, protected)
        elif span.kind == "prefetch":
            wanted = max(end for end, by in foreseen if end <= span.start_ns and key in by.prefetches)
            if session.policy.prefetcher is None or session.policy.prefetcher.into == "cache":
                in_the_way = _refused(log, session, max(free, wanted), span)
            else:
                in_the_way = _full(log.staged("prefetch"), session.policy.prefetch_slots, span)
        else:
            continue
        idle_from = max(free, wanted, _read_by(log, span))
        reached = _covered(in_the_way, idle_from, span.start_ns)
        assert reached >= span.start_ns, (
            f"law 5: h2d rests from {idle_from} to {span.start_ns} ns although the {span.kind} of {key} waits since "
            f"{wanted} and nothing is in its way at {reached}"
        )


def _moment(log: Log, place: Layer, when: str) -> int:
    return log.routed(place) if when == "routed" else log.ended(place)


def _protections(log: Log, session: RecordingSession) -> list[tuple[int, int, frozenset[ExpertId]]]:
    """The protected experts from each foresight to the next: (begin, end, experts)."""
    protected = [(log.one(place, "foresee").end_ns, f.protect) for place, f in session.foresights.items()]
    ends = [*(begin for begin, _ in protected[1:]), NEVER]
    return [(begin, end, experts) for (begin, experts), end in zip(protected, ends, strict=False)]


def _pinned(
    log: Log, session: RecordingSession, key: ExpertId, protected: list[tuple[int, int, frozenset[ExpertId]]]
) -> list[Interval]:
    """Times in which an expert must stay: protected, or active in the layer at work, or protected as that layer's loads
    began.
    """
    pinned = [(begin, end) for begin, end, experts in protected if key in experts]
    for place, plan in session.plans.items():
        active = place[1] == key.layer and key.expert in (*plan.gpu, *plan.cpu)
        routed = log.routed(place)
        if active or (plan.loads and any(b <= routed <= e for b, e in pinned)):
            pinned.append((routed, log.ended(place)))
    return pinned


def _full(prefetched: list[Stay], slots: int, span: Span) -> list[Interval]:
    """Times in which all staging slots for prefetches were taken."""
    others = [s for s in prefetched if s.copy is not span]
    moments = sorted({t for s in others for t in (s.came, s.left)})
    return [(a, b) for a, b in pairwise(moments) if sum(s.came <= a and s.left >= b for s in others) >= slots]


def _refused(log: Log, session: RecordingSession, idle_from: int, span: Span) -> list[Interval]:
    """Times in which the cache refused a copy: the lane asked whenever that could have changed, and got none."""
    changes = {s.end_ns for s in log.lanes["h2d"] if s.kind == "release"}
    changes |= {log.ended(place) for place in log.routed_layers()} | {idle_from, span.start_ns}
    moments = sorted(t for t in changes if idle_from <= t <= span.start_ns)
    return [(a, b) for a, b in pairwise(moments) if a in session.refused]


def _covered(intervals: Iterable[Interval], begin: int, end: int) -> int:
    """The end of the time from ``begin`` that the intervals cover without a gap, ``end`` at most."""
    reached = begin
    for a, b in sorted(intervals):
        if a <= reached < end:
            reached = max(reached, b)
    return reached


# --- laws 2 and 5 between host and GPU --------------------------------------------------------------------------------


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
    """Spans with kernels of their own, by layer: not the copies, whose kernels come with those of the experts."""
    return [((span.step, span.layer), span) for span in log.lanes["gpu"] if span.kind != "fetch"]


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
            call = call_of(log, layer, span) if costs.kernel_copies else []
            extra = [0] if span in call[1:] else _extra_times(log, layer, span, expert)
            return [expert.gpu_ns[span.tokens] + extra_ns for extra_ns in extra]
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
