"""Law 5 for background copies: a swap or a prefetch starts as soon as the link is free and it is allowed.

Spans do not show when such a copy was requested, nor what was protected meanwhile; the recording session does. Moments
are taken from the spans: a plan's start, a foresight's end, the end of a layer or a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from policies.mechanism.views import ExpertId, Upload
from sim.runs.spans import Span
from trilane.testing.log import NEVER, Layer, Log, Spans, Stay, log_of
from trilane.testing.recording import RecordingSession

Interval = tuple[int, int]


def law_5_background_copies(spans: Spans, session: RecordingSession) -> None:
    """Between the moment at which it could start and its start, something stands in the way of each such copy."""
    log = log_of(spans)
    protected = _protections(log, session)
    asked = [(_moment(log, place, when), swap) for place, when, swaps in session.swaps_asked for swap in swaps]
    foreseen = [(log.one(place, "foresee").end_ns, told) for place, told in session.foresights.items()]
    for free, span in log.transfers():
        key = ExpertId(span.layer, span.expert)
        if span.kind == "swap":
            wanted, swap = max(p for p in asked if p[0] <= span.start_ns and p[1].incoming == key)
            in_the_way = [(s.readable, s.left) for s in log.stays[key] if s.leaving == "release"]
            if isinstance(swap, Upload):
                in_the_way += _refused(log, session, max(free, wanted), span)
            else:
                in_the_way += _pinned(log, session, swap.outgoing, protected)
        elif span.kind == "prefetch":
            wanted = max(end for end, told in foreseen if end <= span.start_ns and key in told.prefetches)
            if session.policy.prefetcher is None or session.policy.prefetcher.into == "cache":
                in_the_way = _refused(log, session, max(free, wanted), span)
            else:
                in_the_way = _full(log.staged("prefetch"), session.policy.prefetch_slots, span)
        else:
            continue
        idle_from = max(free, wanted)
        reached = _covered(in_the_way, idle_from, span.start_ns)
        assert reached >= span.start_ns, (
            f"law 5: h2d rests from {idle_from} to {span.start_ns} ns although the {span.kind} of {key} waits since "
            f"{wanted} and nothing is in its way at {reached}"
        )


def _moment(log: Log, place: Layer, when: str) -> int:
    return log.routed(place) if when == "routed" else log.ended(place)


def _protections(log: Log, session: RecordingSession) -> list[tuple[int, int, frozenset[ExpertId]]]:
    """From which foresight to which what was protected."""
    told = [(log.one(place, "foresee").end_ns, f.protect) for place, f in session.foresights.items()]
    return [
        (begin, told[place + 1][0] if place + 1 < len(told) else NEVER, what)
        for place, (begin, what) in enumerate(told)
    ]


def _pinned(
    log: Log, session: RecordingSession, key: ExpertId, protected: list[tuple[int, int, frozenset[ExpertId]]]
) -> list[Interval]:
    """When an expert must stay: protected, or active in the layer at work, or protected as that layer's loads began."""
    found = [(begin, end) for begin, end, what in protected if key in what]
    for place, plan in session.plans.items():
        active = place[1] == key.layer and key.expert in (*plan.gpu, *plan.cpu)
        routed = log.routed(place)
        if active or (plan.loads and any(b <= routed <= e for b, e in found)):
            found.append((routed, log.ended(place)))
    return found


def _full(prefetched: list[Stay], slots: int, span: Span) -> list[Interval]:
    """When all staging slots for prefetches were taken."""
    others = [s for s in prefetched if s.copy is not span]
    moments = sorted({t for s in others for t in (s.came, s.left)})
    return [(a, b) for a, b in pairwise(moments) if sum(s.came <= a and s.left >= b for s in others) >= slots]


def _refused(log: Log, session: RecordingSession, idle_from: int, span: Span) -> list[Interval]:
    """When the cache refused it: the lane has requested a copy whenever that could have changed, and got none."""
    changes = {s.end_ns for s in log.lanes["h2d"] if s.kind == "release"}
    changes |= {log.ended(place) for place in log.routed_layers()} | {idle_from, span.start_ns}
    moments = sorted(t for t in changes if idle_from <= t <= span.start_ns)
    return [(a, b) for a, b in pairwise(moments) if a in session.refused]


def _covered(intervals: Iterable[Interval], begin: int, end: int) -> int:
    """How far the intervals cover ``begin`` to ``end`` without a gap."""
    reached = begin
    for a, b in sorted(intervals):
        if a <= reached < end:
            reached = max(reached, b)
    return reached
