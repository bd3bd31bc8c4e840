"""Law 5 (docs/design.md) on spans alone: no lane is idle while its next piece of work is ready."""

from __future__ import annotations

from itertools import pairwise

from sim.costs.cost_table import CostTable
from sim.runs.spans import INSTANT, Span
from trilane.testing.launches import first_ns, launch_of, law_5_launches
from trilane.testing.log import Expert, Layer, Log, Spans, Stay, home, log_of


def law_5_work_conservation(spans: Spans, demand_slots: int | None = None, costs: CostTable | None = None) -> None:
    """No lane is idle while its next piece of work is ready; ``ready_ns`` is what the dependencies say.

    ``demand_slots``: staging slots for demand loads; the link may rest while all of them hold experts. ``costs``: the
    world's; without them the GPU is taken to start when a launch has ended.
    """
    log = log_of(spans)
    if costs is not None:
        law_5_launches(log.spans, costs)
    for lane, on_lane in log.lanes.items():
        free = 0
        for span in on_lane:
            if span.kind in INSTANT:
                continue
            assert span.start_ns == max(free, span.ready_ns), (
                f"law 5: {lane} is free at {free} ns, its next work is ready at {span.ready_ns}, but starts at "
                f"{span.start_ns}: {span}"
            )
            free = span.end_ns
    stays = log.stays()
    for layer in log.routed_layers():
        for span in log.layers[layer]:
            expected = _ready(log, stays, layer, span, costs)
            assert expected is None or span.ready_ns == expected, f"law 5: {span} could have started at {expected} ns"
        _arrival_order(log, stays, layer)
    _link_serves_demand(log, stays, demand_slots)


def _ready(log: Log, stays: dict[Expert, list[Stay]], layer: Layer, span: Span, costs: CostTable | None) -> int | None:
    """When the inputs of a span were complete; None where it has none but the span before it."""

    def end(*kinds: str) -> int:
        return max(s.end_ns for s in log.of(layer, *kinds))

    launches = [s for s in log.of(layer, "launch") if s.expert < 0]  # attention and so on, combine, late forecasts
    forecast = span.target_layer >= 0
    match span.lane, span.kind:
        case "gpu", "attention" | "gate" | "speculate" | "shared":
            return first_ns(launch_of(log, layer, span), costs)
        case "gpu", "expert":
            return max(first_ns(launch_of(log, layer, span), costs), _stay_at(stays, layer, span).readable)
        case "gpu", "combine":
            parts = log.of(layer, "result") or log.joining(layer)
            used = {s.expert for s in log.computed(layer)}
            streamed = [s for s in log.demanded(layer) if s.expert not in used]
            return max([first_ns(launches[1], costs), *(s.end_ns for s in [*parts, *streamed])])
        case "host", "wait" if forecast:
            return end("routing")
        case "host", "wait":
            return log.of(layer, "routing")[0].end_ns
        case "host", "plan":
            if not log.committed(layer):
                return min(s.end_ns for s in log.of(layer, "wait"))
            return max(launches[0].end_ns, log.ended((layer[0], layer[1] - 1)))  # decided when the layer is at work
        case "host", "foresee":
            waited = [s for s in log.of(layer, "wait") if s.target_layer >= 0]
            late = len(launches) > 2 or log.committed(layer)  # a forecast that comes by itself is waited for
            assert bool(waited) == (late and bool(log.of(layer, "speculate"))), f"law 2: {span} has waited for {waited}"
            if waited:
                return waited[0].end_ns
            return end("routing") if log.of(layer, "routing") else None  # committed, and no forecast on the GPU
        case "host", "program":
            step, place = layer
            before = (step, place - 1) if place else (step - 1, -1)
            return log.ended(before) if before in log.layers else None
        case "host", "observe":
            return end("plan")
        case "host", "launch" if span is not launches[0]:
            return end("plan")
        case "d2h", "routing":
            made = log.of(layer, "speculate" if forecast else "gate")
            copies = [s for s in log.of(layer, "routing") if s.target_layer >= 0]
            if forecast and len(copies) == 2 and span is copies[0]:  # the late ones have a copy of their own
                made = made[: len(made) - len(launches) + 2]
            return max(s.end_ns for s in made)
        case "d2h", "activations":
            own = log.of(layer, "expert", "deferred", lane="cpu")
            return max(end("attention"), end("plan" if own else "foresee"))
        case "cpu", "precompute":
            return end("activations", "foresee")
        case "cpu", "expert" | "deferred":
            return end("activations")
        case "h2d", "result":
            return max([end("plan"), *(s.end_ns for s in log.joining(layer))])
    return None


def _stay_at(stays: dict[Expert, list[Stay]], layer: Layer, span: Span) -> Stay:
    return next(s for s in reversed(stays[layer[1], span.expert]) if s.readable <= span.start_ns)


def _arrival_order(log: Log, stays: dict[Expert, list[Stay]], layer: Layer) -> None:
    """The stream runs what was there first, then what arrives in its order."""
    routed = log.routed(layer)
    arrivals = [_stay_at(stays, layer, s).readable for s in log.of(layer, "expert", lane="gpu")]
    waited = [max(time, routed) for time in arrivals]
    assert waited == sorted(waited), f"law 5: step, layer {layer}: experts that arrived at {arrivals} ran in this order"


def _link_serves_demand(log: Log, stays: dict[Expert, list[Stay]], demand_slots: int | None) -> None:
    """Between its plan and the start of a demand load the link idles only for lack of a staging slot."""
    staged = [s for some in stays.values() for s in some if s.leaving == "release" and s.copy.kind == "demand"]
    transfers = [s for s in log.lanes["h2d"] if s.kind not in INSTANT]
    for before, span in pairwise([None, *transfers]):
        if span is None or span.kind != "demand":
            continue
        idle_from = max(before.end_ns if before else 0, log.planned((span.step, home(span))))
        if span.start_ns <= idle_from:
            continue
        own = next(s for s in stays[home(span), span.expert] if s.copy is span)
        holders = [s for s in staged if s.came <= idle_from and s.left >= span.start_ns and s is not own]
        full = own.leaving == "release" and len(holders) >= (demand_slots or 1)
        assert full, (
            f"law 5: h2d rests from {idle_from} to {span.start_ns} ns although the demand load of layer {home(span)}, "
            f"expert {span.expert} waits and {len(holders)} staging slots are taken"
        )
