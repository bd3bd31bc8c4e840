"""Laws 1 to 5 and 12 (docs/design.md), checked on spans alone: each raises AssertionError naming law and culprit.

They depend on the format of spans (sim/runs/spans.py) and on the rules, and on nothing in the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from sim.costs.cost_table import CostTable
from sim.runs.spans import Span
from sim.runs.vocabulary import COPIES, INSTANT
from trilane.testing.accounting import law_12_accounting
from trilane.testing.launches import law_2_launches
from trilane.testing.log import Layer, Log, Routings, Spans, home, log_of
from trilane.testing.work_conservation import law_5_work_conservation


def check_all(
    spans: Spans, routings: Routings, budget_bytes: int, batch: int, demand_slots: int | None = None,
    costs: CostTable | None = None,
) -> None:
    """All laws that spans alone can show, and with ``costs`` those of launches."""
    spans = log_of(spans)
    law_3_exclusivity(spans)
    law_1_conservation(spans, routings)
    law_2_causality(spans)
    if costs is not None:
        law_2_launches(spans, costs)
        law_4_sizes(spans, costs)
    law_4_capacity(spans, budget_bytes)
    law_5_work_conservation(spans, demand_slots, costs)
    law_12_accounting(spans, batch)


# --- law 1 ------------------------------------------------------------------------------------------------------------


def law_1_conservation(spans: Spans, routings: Routings) -> None:
    """Every routed (token, expert) pair is computed exactly once, on one device, and nothing else is."""
    log = log_of(spans)
    assert log.routed_layers() == sorted(routings), "law 1: the layers that ran are not those of the demand"
    for layer, workload in routings.items():
        done = log.computed(layer)
        for span in done:
            where = f"law 1: step, layer {layer}, expert {span.expert}"
            assert span.expert in workload, f"{where} is computed on {span.lane}, but no token was routed to it"
            assert span.tokens == workload[span.expert], (
                f"{where} computes {span.tokens} tokens on {span.lane}, {workload[span.expert]} were routed to it"
            )
        for expert in workload:
            places = [s.lane for s in done if s.expert == expert]
            assert len(places) == 1, f"law 1: step, layer {layer}: expert {expert} is computed on {places}, not once"


# --- law 2 ------------------------------------------------------------------------------------------------------------


def law_2_causality(spans: Spans) -> None:
    """Nothing starts before what it needs has ended."""
    log = log_of(spans)
    for layer in log.routed_layers():
        _inputs_before_layer(log, layer)
        _chain_within_layer(log, layer)
        for span in log.of(layer, "expert", "deferred", "precompute"):
            _expert_after_inputs(log, layer, span)
        if log.of(layer, "deferred"):
            assert (layer[0], layer[1] + 1) in log.layers, f"law 2: step, layer {layer}, the last one, defers experts"
    for span in log.lanes["cpu"]:
        assert span.kind in ("expert", "deferred", "precompute"), f"law 2: {span.kind} on the cpu lane"


def _after(later: Span, earlier: Iterable[Span], why: str) -> None:
    for span in earlier:
        assert span.end_ns <= later.start_ns, (
            f"law 2: {why}: {later.kind} of step {later.step}, layer {later.layer}, expert {later.expert} starts at "
            f"{later.start_ns} ns, {span.kind} of layer {span.layer}, expert {span.expert} ends at {span.end_ns}"
        )


def _inputs_before_layer(log: Log, layer: Layer) -> None:
    """Attention needs the layer before, or the tokens that the step before has chosen."""
    step, place = layer
    attention = log.one(layer, "attention")
    if place:
        _after(attention, [log.one((step, place - 1), "combine")], "a layer needs the one before")
    elif (step - 1, -1) in log.layers:
        for first in (attention, *log.of((step, -1), "draft")):
            _after(first, [log.one((step - 1, -1), "wait")], "a step needs the one before")
    if not place:
        _after(attention, log.of((step, -1), "draft"), "what is verified is drafted before")
    if (step, place + 1) not in log.layers:
        _after(log.one((step, -1), "attention"), [log.one(layer, "combine")], "the head needs the last layer")


def _chain_within_layer(log: Log, layer: Layer) -> None:
    """attention, gate, routing, wait, plan, experts, combine; a committed layer has no gate, and no routing and wait
    of its own (it may copy a forecast and wait for that).

    It needs the foresight that committed it, and its plan may come before its attention has ended.
    """
    own_routing = [s for s in log.of(layer, "routing") if s.target_layer < 0]
    forecast = [s for s in log.of(layer, "routing") if s.target_layer >= 0]
    attention, plan = log.one(layer, "attention"), log.one(layer, "plan")
    if log.committed(layer):
        committing = log.one((layer[0], layer[1] - 1), "foresee")
        _after(plan, [committing], "a committed layer needs the foresight that committed it")
        assert not log.of(layer, "gate") + own_routing, f"law 2: step, layer {layer} is half routed"
        chain: list[list[Span]] = []
    else:
        chain = [[attention], [log.one(layer, "gate")], own_routing, [_own_wait(log, layer)], [plan]]
    for span in log.of(layer, "activations"):
        _after(span, [attention], "activations are what attention has computed")
    for before, after in pairwise(chain):
        for span in after:
            _after(span, before, "a layer's chain")
    for span in log.of(layer, "foresee"):
        waits = [s for s in log.of(layer, "wait") if s.target_layer >= 0]
        _after(span, forecast + waits + log.of(layer, "plan"), "foreseeing needs the forecast")
    for span in forecast:
        _after(span, log.of(layer, "attention", "gate", "speculate")[:2], "a forecast is copied once it is computed")
    combine = log.one(layer, "combine")
    on_gpu = [s for s in log.computed(layer) if s.lane == "gpu"]
    _after(combine, on_gpu + log.joining(layer) + log.of(layer, "shared", "result"), "combining needs all parts")
    for span in log.of(layer, "result"):
        _after(span, log.joining(layer), "a result is copied once it is computed")


def _own_wait(log: Log, layer: Layer) -> Span:
    """The one for the layer's routing, not for a forecast."""
    [wait] = [s for s in log.of(layer, "wait") if s.target_layer < 0]
    return wait


def _expert_after_inputs(log: Log, layer: Layer, span: Span) -> None:
    if span.kind == "precompute":
        assert home(span) == layer[1] + 1, f"law 2: a precompute of layer {layer[1]} is for layer {home(span)}"
        _after(span, log.of(layer, "foresee"), "computing ahead needs the forecast")
    else:
        _after(span, log.of(layer, "plan"), "experts need the plan")
    if span.lane == "cpu":
        sent = log.of(layer, "activations")
        assert sent, f"law 2: step, layer {layer}: the CPU computes expert {span.expert}, no activations were sent"
        _after(span, sent, "the CPU needs the activations")
        return
    assert (span.kind, span.lane) == ("expert", "gpu"), f"law 2: {span.kind} of an expert on the {span.lane} lane"
    readable = [(s.readable, s.left) for s in log.stays.get((layer[1], span.expert), ())]
    assert any(begin <= span.start_ns and span.end_ns <= end for begin, end in readable), (
        f"law 2: step, layer {layer}: expert {span.expert} runs on the GPU from {span.start_ns} to {span.end_ns} ns, "
        f"it can be read {readable}"
    )


# --- law 3 ------------------------------------------------------------------------------------------------------------


def law_3_exclusivity(spans: Spans) -> None:
    """Spans of one lane never overlap, and none ends before it starts."""
    for lane, on_lane in log_of(spans).lanes.items():
        for span in on_lane:
            assert span.start_ns <= span.end_ns, f"law 3: a span on {lane} ends before it starts: {span}"
        for before, after in pairwise(s for s in on_lane if s.kind not in INSTANT):
            assert before.end_ns <= after.start_ns, f"law 3: {lane} does two things at once:\n{before}\n{after}"


# --- law 4 ------------------------------------------------------------------------------------------------------------


def law_4_capacity(spans: Spans, budget_bytes: int) -> None:
    """Resident, loading and staged bytes never exceed the budget; what the layer at work needs does not leave."""
    log = log_of(spans)
    stays = [(expert, stay) for expert, some in log.stays.items() for stay in some]
    changes = [(stay.came, 1, stay.copy.bytes, expert) for expert, stay in stays]
    changes += [(stay.left, 0, -stay.copy.bytes, expert) for expert, stay in stays]
    held = 0
    for now, _, change, expert in sorted(changes):  # at one instant, evictions come before arrivals
        held += change
        assert held <= budget_bytes, f"law 4: {held} of {budget_bytes} bytes are held at {now} ns, when {expert} comes"
    for layer in log.routed_layers():
        _pinned_stay(log, layer)


def law_4_sizes(spans: Spans, costs: CostTable) -> None:
    """An expert has the bytes of its layer and width wherever it is copied, kept, or read by the GPU."""
    for span in log_of(spans).spans:
        if span.kind in (*COPIES, "place", "evict", "release") or (span.lane, span.kind) == ("gpu", "expert"):
            size = costs.experts[home(span)].of(span.expert).expert_bytes
            assert span.bytes == size, f"law 4: expert {span.expert} has {size} bytes, not those of {span}"


def _pinned_stay(log: Log, layer: Layer) -> None:
    routed = log.routed(layer)
    for span in log.of(layer, "expert"):
        for stay in log.stays.get((layer[1], span.expert), ()):
            leaves = stay.leaving == "evict" and stay.readable <= routed < stay.left < span.end_ns
            assert not leaves, (
                f"law 4: step, layer {layer}: expert {span.expert} is active and leaves at {stay.left} ns, between its "
                f"routing ({routed}) and its use ({span.end_ns})"
            )
