"""Laws 1 to 5 and 12 (docs/design.md), checked on spans alone: each raises AssertionError naming law and culprit.

They depend on the format of spans (sim/runs/spans.py) and on the rules, and on nothing in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import pandas as pd

from sim.costs.cost_table import CostTable
from sim.runs.metrics import metrics_of
from sim.runs.spans import Span, spans_frame
from sim.runs.stalls import stalls_of
from sim.runs.vocabulary import COPIES, INSTANT, READS
from trilane.testing.host_memory import law_5_reads, law_13_host_memory, slow_disk_metrics
from trilane.testing.log import NEVER, Layer, Log, Routings, Spans, Stay, home, log_of
from trilane.testing.pools import law_2_phases, law_3_kernel_copies
from trilane.testing.work_conservation import law_2_launches, law_5_work_conservation


def check_all(
    spans: Spans, routings: Routings, budget_bytes: int, batch: int, demand_slots: int | None = None,
    costs: CostTable | None = None, host_bytes: int | None = None,
) -> None:
    """All laws that spans alone can show, and with ``costs`` those of launches; with ``host_bytes``, the bytes of the
    host's memory above a disk, those of both."""
    spans = log_of(spans)
    law_3_exclusivity(spans)
    law_1_conservation(spans, routings)
    law_2_causality(spans)
    if costs is not None:
        law_2_launches(spans, costs)
        law_2_phases(spans, costs)
        law_3_kernel_copies(spans, costs)
        law_4_sizes(spans, costs)
    law_4_capacity(spans, budget_bytes)
    law_5_work_conservation(spans, demand_slots, costs)
    law_12_accounting(spans, batch)
    if host_bytes is not None:
        law_13_host_memory(spans, host_bytes)
        law_5_reads(spans, host_bytes)


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
        for span in log.of(layer, "expert", "deferred", "precompute", "gate_up"):
            _expert_after_inputs(log, layer, span)
        if log.of(layer, "deferred"):
            assert (layer[0], layer[1] + 1) in log.layers, f"law 2: step, layer {layer}, the last one, defers experts"
    for span in log.lanes["cpu"]:
        assert span.kind in ("expert", "deferred", "precompute", "gate_up"), f"law 2: {span.kind} on the cpu lane"


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
    if span.kind == "precompute" or span.target_layer >= 0:
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


# --- law 12: the books balance, and every metric worked out anew, slowly, is the same ---------------------------------


Value = float | None


def law_12_accounting(spans: Spans, batch: int) -> None:
    """busy + idle = makespan on every lane, stalls = GPU idle time, bytes = sum over copies, metrics as done anew."""
    log = log_of(spans)
    frame = spans if isinstance(spans, pd.DataFrame) else spans_frame([tuple(s) for s in log.spans])  # type: ignore[misc]
    makespan = max((s.end_ns for s in log.spans), default=0)
    for span in log.spans:
        assert span.tokens >= 0 <= span.bytes, f"law 12: {span.kind} has {span.tokens} tokens and {span.bytes} bytes"
    for lane in log.lanes:
        busy, idle = _busy(log, lane, 0, makespan), sum(end - begin for begin, end in gaps(log, lane, makespan))
        assert busy + idle == makespan, f"law 12: {lane} is busy {busy} ns and idle {idle} of {makespan}"
    stalls = stalls_of(frame)
    charged = stall_times(log, 0, makespan)
    assert stalls._asdict() == charged, f"law 12: stalls {stalls}, worked out anew {charged}"
    idle = makespan - _busy(log, "gpu", 0, makespan)
    assert sum(stalls) == idle, f"law 12: stalls {stalls} sum to {sum(stalls)} ns, the GPU is idle for {idle}"
    given, expected = metrics_of(frame, batch).to_dict(), slow_metrics(log, batch)
    assert given.keys() == expected.keys(), f"law 12: metrics {given.keys() ^ expected.keys()} are not on both sides"
    for name, value in expected.items():
        same = given[name] == value if value is None or given[name] is None else math.isclose(given[name] or 0, value)
        assert same, f"law 12: {name} is {given[name]}, worked out anew {value}"
    moved = sum(s.bytes for s in log.lanes["h2d"] if s.kind in COPIES and s.phase == "decode")
    made = (given["decode_steps"] or 0) * (given["tokens_per_step"] or 0)
    counted = (given["pcie_bytes_per_token"] or 0) * made * batch
    assert math.isclose(counted, moved) or not given["decode_steps"], f"law 12: {moved} bytes moved, {counted} counted"


def gaps(log: Log, lane: str, until: int) -> list[tuple[int, int]]:
    """Times in ns in which a lane does nothing, from 0 to ``until``."""
    free, idle = 0, []
    for span in log.lanes[lane]:
        if span.start_ns > free:
            idle.append((free, span.start_ns))
        free = max(free, span.end_ns)
    return [*idle, (free, until)] if until > free else idle


def _busy(log: Log, lane: str, begin: int, end: int) -> int:
    return sum(max(0, min(s.end_ns, end) - max(s.start_ns, begin)) for s in log.lanes[lane])


def stall_times(log: Log, begin: int, end: int) -> dict[str, int]:
    """GPU idle time within a window, by the lane that it waited for: the rule of sim/runs/stalls.py, gap by gap."""
    total = {"h2d_ns": 0, "cpu_ns": 0, "host_ns": 0, "disk_ns": 0}
    starts = {s.start_ns: s for s in reversed(log.lanes["gpu"])}
    for gap_begin, gap_end in gaps(log, "gpu", max((s.end_ns for s in log.spans), default=0)):
        for piece_begin, piece_end, cause in _with_reads(log, gap_begin, gap_end, starts.get(gap_end)):
            total[cause] += max(0, min(piece_end, end) - max(piece_begin, begin))
    return total


def _with_reads(log: Log, begin: int, end: int, waiter: Span | None) -> list[tuple[int, int, str]]:
    """``_pieces``, with what lies before the end of a read that was waited for charged to the disk."""
    pieces = _pieces(log, begin, end, waiter)
    if "disk" not in log.lanes or waiter is None or pieces[0][2] == "host_ns":
        return pieces
    reads = [s for s in log.lanes["disk"] if s.kind in READS and s.layer == home(waiter)]
    if waiter.kind == "expert":
        ends = [s.end_ns for s in reads if s.expert == waiter.expert and s.end_ns <= waiter.ready_ns]
    else:
        ends = [s.end_ns for s in reads if s.kind == "read" and s.step == waiter.step and s.end_ns <= pieces[0][1]]
    split = min(max(max(ends, default=0), begin), pieces[-1][1])
    return [(begin, split, "disk_ns"), *((max(a, split), max(b, split), cause) for a, b, cause in pieces)]


def _pieces(log: Log, begin: int, end: int, waiter: Span | None) -> list[tuple[int, int, str]]:
    if waiter is None or waiter.kind not in ("expert", "combine"):
        return [(begin, end, "host_ns")]
    if waiter.kind == "expert":
        here = [*log.copied.get((waiter.layer, waiter.expert), ()), *log.of((waiter.step, waiter.layer), "hand_over")]
        copied = any(s.end_ns == waiter.ready_ns for s in here)
        return [(begin, end, "h2d_ns" if copied else "host_ns")]
    layer = (waiter.step, waiter.layer)
    on_cpu = [s.end_ns for s in log.joining(layer) if s.end_ns <= waiter.ready_ns]
    results = [s.end_ns for s in log.of(layer, "result", "hand_over")]
    demanded = [s.end_ns for s in log.demanded(layer)]
    if waiter.ready_ns not in on_cpu + results + demanded:
        return [(begin, end, "host_ns")]
    split = min(max(max(on_cpu, default=0), begin), end)
    return [(begin, split, "cpu_ns"), (split, end, "h2d_ns")]


# --- every metric, worked out plainly ---------------------------------------------------------------------------------


def slow_metrics(log: Log, batch: int) -> dict[str, Value]:
    """All of ``Metrics.to_dict()``."""
    waits = [s for s in log.lanes["host"] if s.kind == "wait" and s.layer == -1]
    prefills = [s.end_ns for s in waits if s.phase == "prefill"]
    decodes = [s.end_ns for s in waits if s.phase == "decode"]
    idle = {s.step for s in log.lanes["d2h"] if s.kind == "routing" and s.layer == -1 and not s.tokens}
    tokens = sum((s.step not in idle) + s.tokens for s in waits if s.phase == "decode")
    before = [s.end_ns for s in waits[: len(waits) - len(decodes)]]
    begin, end = ((before[-1] if before else 0), decodes[-1]) if decodes else (0, 0)
    makespan = max((s.end_ns for s in log.spans), default=0)
    tpot = _share((end - begin) / 1e6, tokens)
    values: dict[str, Value] = {
        "ttft_ms": prefills[-1] / 1e6 if prefills else None, "tpot_ms": tpot,
        "tokens_per_s": _share(1000, tpot or 0), "throughput_tokens_per_s": _share(1000 * batch, tpot or 0),
        "makespan_ms": makespan / 1e6, "steps": len(waits), "decode_steps": len(decodes),
        "tokens_per_step": _share(tokens, len(decodes)), **_hits(log), **_prefetches(log, tokens * batch),
    }
    for prefix, (a, b) in {"": (begin, end), "run_": (0, makespan)}.items():
        values |= {f"{prefix}{lane}_busy_share": _share(_busy(log, lane, a, b), b - a) for lane in log.lanes}
    values |= slow_disk_metrics(log, tokens * batch) if "disk" in log.lanes else {}
    for name, ns in stall_times(log, begin, end).items():
        cause = name.removesuffix("_ns")
        if cause == "disk" and "disk" not in log.lanes:
            continue
        values |= {f"stall_{cause}_ms": _share(ns / 1e6, tokens), f"stall_{cause}_share": _share(ns, end - begin)}
    planning = [s for s in log.lanes["host"] if s.kind in ("plan", "foresee") and s.phase == "decode"]
    return values | {"plan_overhead_share": _share(sum(s.end_ns - s.start_ns for s in planning), end - begin)}


def _share(part: float, whole: float) -> Value:
    return part / whole if whole else None


def _hits(log: Log) -> dict[str, Value]:
    stays = log.stays
    counts: dict[str, int] = {}
    loads = {(s.step, home(s), s.expert) for s in log.spans if s.kind == "demand"}
    for layer in log.routed_layers():
        routed = log.routed(layer)
        for span in log.computed(layer):
            resident = any(s.readable <= routed <= s.left for s in stays.get((layer[1], span.expert), ()))
            on_gpu = span.lane == "gpu"
            for when in ("", "decode_") if span.phase == "decode" else ("",):
                for name, of, hit in (
                    ("resident", 1, resident), ("token", span.tokens, resident), ("gpu", int(on_gpu), resident),
                    ("served", 1, on_gpu and (*layer, span.expert) not in loads),
                ):
                    key = f"{when}{name}_hit_rate"
                    counts[key] = counts.get(key, 0) + of
                    counts[f"{key}+"] = counts.get(f"{key}+", 0) + of * hit
    names = [f"{w}{n}_hit_rate" for w in ("", "decode_") for n in ("resident", "token", "gpu", "served")]
    return {name: _share(counts.get(f"{name}+", 0), counts.get(name, 0)) for name in names}


def _prefetches(log: Log, tokens: int) -> dict[str, Value]:
    counts = dict.fromkeys(("used", "late", "wasted", "active"), 0)
    moved = dict.fromkeys(("demand", "prefetch_used", "prefetch_wasted", "swap"), 0)
    for (layer, expert), some in log.stays.items():
        for stay in some:
            kind = stay.copy.kind
            if kind == "prefetch":
                outcome = _outcome(log, stay, layer, expert)
                counts[outcome] += 1
                counts["active"] += _active_next(log, stay, layer, expert)
                kind = "prefetch_wasted" if outcome == "wasted" else "prefetch_used"
            if stay.copy.phase == "decode" and kind in moved:
                moved[kind] += stay.copy.bytes
    started = sum(counts.values()) - counts["active"]
    return {
        **{f"prefetches_{outcome}": counts[outcome] for outcome in ("used", "late", "wasted")},
        "prefetches_withdrawn": sum(s.kind == "withdraw" for s in log.spans),
        "prefetch_accuracy": _share(counts["active"], started),
        **{f"pcie_{kind}_bytes_per_token": _share(size, tokens) for kind, size in moved.items()},
        "pcie_bytes_per_token": _share(sum(moved.values()), tokens),
    }


def _outcome(log: Log, stay: Stay, layer: int, expert: int) -> str:
    runs = [
        s for s in log.lanes["gpu"]
        if s.kind == "expert" and (s.layer, s.expert) == (layer, expert) and stay.readable <= s.start_ns <= stay.left
    ]
    if not runs:
        return "wasted"
    return "late" if log.routed((runs[0].step, layer)) < stay.readable else "used"


def _active_next(log: Log, stay: Stay, layer: int, expert: int) -> bool:
    """True if the expert was active in the next run of its layer whose plan the copy could still serve."""
    coming = [(log.planned(at), at) for at in log.routed_layers() if at[1] == layer and log.planned(at) >= stay.came]
    following: Layer | None = min(coming, default=(NEVER, None))[1]
    return following is not None and any(s.expert == expert for s in log.computed(following))
