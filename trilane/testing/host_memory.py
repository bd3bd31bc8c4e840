"""Law 13 (docs/design.md), and law 5 for reads: the host's memory above a disk, checked on spans alone."""

from __future__ import annotations

from collections import defaultdict

from sim.runs.spans import Span
from sim.runs.vocabulary import COPIES, READS
from trilane.testing.log import Expert, Log, Spans, Stay, home, log_of


def law_13_host_memory(spans: Spans, host_bytes: int) -> None:
    """Held and arriving bytes never exceed the host's memory; what a copy or the CPU reads is there until its end."""
    log = log_of(spans)
    if "disk" not in log.lanes:
        assert not _users(log), f"law 13: the host holds no expert, but {_users(log)[0]} reads one there"
        return
    stays = [(expert, stay) for expert, some in log.host_stays.items() for stay in some]
    changes = [(stay.came, 1, stay.copy.bytes, expert) for expert, stay in stays]
    changes += [(stay.left, 0, -stay.copy.bytes, expert) for expert, stay in stays]
    held = 0
    for now, _, change, expert in sorted(changes):  # at one instant, experts leave before others come
        held += change
        assert held <= host_bytes, f"law 13: the host holds {held} of {host_bytes} bytes at {now} ns, with {expert}"
    for span in _users(log):
        log.held_by_host(span)
    for span in log.lanes["disk"]:
        assert span.kind in (*READS, "keep", "drop"), f"law 13: {span.kind} on the disk lane"


def law_5_reads(spans: Spans, host_bytes: int) -> None:
    """Between the plan that needs it and its start, a read waits for the disk, or until what is in use leaves room."""
    log = log_of(spans)
    if "disk" not in log.lanes:
        return
    uses = _uses(log)
    stays = [(expert, stay) for expert, some in log.host_stays.items() for stay in some]
    for free, span in log.in_order("disk"):
        if span.kind == "read" and (span.step, span.layer) in log.layers:
            idle_from = max(free, span.ready_ns, log.planned((span.step, span.layer)))
            for now in [idle_from, *sorted({end for some in uses.values() for _, end in some if idle_from < end})]:
                if now >= span.start_ns:
                    break
                _no_room(span, now, host_bytes, stays, uses)


Uses = dict[Expert, list[tuple[int, int]]]  # of each expert: from when it was needed, until its use had ended


def _users(log: Log) -> list[Span]:
    """Spans that read an expert in the host's memory."""
    return [*log.lanes["cpu"], *(span for span in log.lanes["h2d"] if span.kind in COPIES)]


def _uses(log: Log) -> Uses:
    batches: dict[tuple[object, ...], int] = defaultdict(int)  # the CPU is done with experts that it was given together
    for span in log.lanes["cpu"]:
        batch = (span.step, span.layer, span.kind, span.ready_ns)
        batches[batch] = max(batches[batch], span.end_ns)
    uses: Uses = defaultdict(list)
    for span in _users(log):
        end = batches.get((span.step, span.layer, span.kind, span.ready_ns), span.end_ns)
        since = span.start_ns if span.kind in ("prefetch", "swap") else log.routed((span.step, span.layer))
        uses[home(span), span.expert].append((since, end))
    return uses


def _no_room(read: Span, now: int, host_bytes: int, stays: list[tuple[Expert, Stay]], uses: Uses) -> None:
    """At ``now``, too much is in use for the read to start."""
    present = [(expert, stay.copy.bytes) for expert, stay in stays if stay.came <= now < stay.left]
    used = sum(size for expert, size in present if any(since <= now < end for since, end in uses.get(expert, ())))
    assert used + read.bytes > host_bytes, (
        f"law 5: the disk rests at {now} ns although {read} waits and {used} of {host_bytes} bytes are in use"
    )


def slow_disk_metrics(log: Log, tokens: int) -> dict[str, float | None]:
    """All of ``DISK_METRICS``."""
    loads = {(s.step, home(s), s.expert) for s in log.spans if s.kind == "demand"}
    needed = held = 0
    for layer in log.routed_layers():
        for span in log.computed(layer):
            if span.phase == "decode" and (span.lane == "cpu" or (*layer, span.expert) in loads):
                needed += 1
                stays = log.host_stays.get((layer[1], span.expert), ())
                held += any(stay.readable <= log.routed(layer) <= stay.left for stay in stays)
    read = {kind: sum(s.bytes for s in log.lanes["disk"] if (s.kind, s.phase) == (kind, "decode")) for kind in READS}
    return {
        "ram_hit_rate": held / needed if needed else None,
        "disk_bytes_per_token": sum(read.values()) / tokens if tokens else None,
        "disk_ahead_bytes_per_token": read["read_ahead"] / tokens if tokens else None,
    }
