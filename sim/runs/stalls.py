"""Stalls: the time in which the GPU ran nothing, charged to the lane that it waited for.

The rule. Every idle gap of the gpu lane (of all of them, where layers are on several GPUs) ends with a gpu span (the
*waiter*) or with the end of the run, and is charged to what the waiter waited for last, read off its ``ready_ns``:

- attention, gate, shared, speculate: ``host`` (their launch);
- expert: ``h2d`` if the copy of this expert, or a hand-over to its GPU, ended at its ``ready_ns``, else ``host`` (its
  launch came later);
- combine: if the CPU's part (the ``result`` copy where results queue on the link, else the last CPU expert), or a copy
  or a hand-over for the layer, came at its ``ready_ns``, the gap up to the end of the last CPU expert is ``cpu`` and
  the rest ``h2d``; else ``host``;
- the time after the last gpu span: ``host``.

Of what is charged to a copy or to the CPU, the part before the end of the read from the disk that it had to wait for is
``disk`` instead: the last one of the expert, or of the layer.

A span that lasts as long as the host launches it is no stall, although the GPU waits between its kernels.
A tie (launch and copy end in the same ns) is charged to the copy or the CPU. A gap that straddles the edge of a window
counts with the part inside. So in every window they sum exactly, in whole ns, to the GPU's idle time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.runs.columns import Bools, Cells, Columns, Ints, among, cells_of, columns_of, first_at_or_after
from sim.runs.vocabulary import READS, Device, Link

if TYPE_CHECKING:
    import pandas as pd

STALL_LANES = (Link.H2D.value, Device.CPU.value, Device.HOST.value)  # that the GPU may wait for,
STALL_LANES_WITH_DISK = (*STALL_LANES, Link.DISK.value)  # and where there is a disk


class Stalls(NamedTuple):
    """GPU idle time in ns by the lane that it waited for, in the order of ``STALL_LANES_WITH_DISK``."""

    h2d_ns: int
    cpu_ns: int
    host_ns: int
    disk_ns: int = 0


class Gaps(NamedTuple):
    """Idle gaps of the gpu lane in ns: disk up to ``disk_until``, from there cpu up to ``cpu_until``, then h2d up to
    ``h2d_until``, then host."""

    begin: Ints
    disk_until: Ints
    cpu_until: Ints
    h2d_until: Ints
    end: Ints

    def within(self, begin_ns: int, end_ns: int) -> Stalls:
        """Idle time between two times, by cause."""
        edges = [np.clip(edge, begin_ns, end_ns) for edge in self]
        disk, cpu, h2d, host = (int((after - before).sum()) for before, after in pairwise(edges))
        return Stalls(h2d, cpu, host, disk)


def stalls_of(spans: pd.DataFrame) -> Stalls:
    """Stalls of a whole run: they sum to its makespan (last end of any span) less the GPU's busy time."""
    c = columns_of(spans)
    return gaps_of(c, cells_of(c)).within(0, int(c.end.max()) if len(c.end) else 0)


def gaps_of(c: Columns, cells: Cells) -> Gaps:
    """All idle gaps of the GPU from 0 to the last end of any span."""
    gpu = np.flatnonzero(c.on_gpu)
    free = np.append(0, np.maximum.accumulate(c.end[gpu]))
    makespan = int(c.end.max()) if len(c.end) else 0
    starts = np.append(c.start[gpu], makespan)
    rows = np.flatnonzero(starts > free)
    begin, end = free[rows], starts[rows]
    tail = rows == len(gpu)
    waiter = c.where(gpu[rows[~tail]])
    disk_until, cpu_until, h2d_until = begin.copy(), begin.copy(), begin.copy()
    cpu_until[~tail], h2d_until[~tail] = _edges(c, cells, waiter, begin[~tail], end[~tail])
    if c.on("disk").any():
        disk_until[~tail] = np.clip(_read_by(c, cells, waiter, cpu_until[~tail]), begin[~tail], h2d_until[~tail])
        cpu_until = np.maximum(disk_until, cpu_until)
    return Gaps(begin, disk_until, cpu_until, h2d_until, end)


def _read_by(c: Columns, cells: Cells, waiter: Columns, cpu_until: Ints) -> Ints:
    """Last end, in ns, of reads that ``waiter`` waited for: of an expert until its copy, of a layer until the end of
    its CPU experts; -1 without one."""
    reads = c.where(c.of(*READS))
    expert = waiter.of("expert")
    keys = np.sort(cells.at(cells.expert(reads.home, reads.expert), reads.end))
    wanted = cells.at(cells.expert(waiter.home, np.maximum(waiter.expert, 0)), waiter.ready)
    last = np.append(keys, -1)[np.searchsorted(keys, wanted, "right") - 1]
    read = np.where(expert & (last // cells.horizon == wanted // cells.horizon), last % cells.horizon, -1)
    needed = c.where(c.of("read"))
    layers = np.sort(cells.at(cells.layer(needed.step, needed.home), needed.end))
    own = cells.at(cells.layer(waiter.step, waiter.home), cpu_until)
    last = np.append(layers, -1)[np.searchsorted(layers, own, "right") - 1]
    return np.where(waiter.of("combine") & (last // cells.horizon == own // cells.horizon), last % cells.horizon, read)


def _edges(c: Columns, cells: Cells, waiter: Columns, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Times up to which the gaps before ``waiter`` are charged to cpu, and from there to h2d."""
    copied = waiter.of("expert") & _copy_ends_at(c, cells, waiter)
    h2d_until = np.where(copied, end, begin)
    cpu_until = begin.copy()
    combine = np.flatnonzero(waiter.of("combine"))
    if len(combine):
        cpu_end, part_end = _cpu_part(c, cells, waiter.where(waiter.of("combine")))
        waited = part_end == waiter.ready[combine]
        cpu_until[combine] = np.where(waited, np.clip(cpu_end, begin[combine], end[combine]), begin[combine])
        h2d_until[combine] = np.where(waited, end[combine], begin[combine])
    return cpu_until, h2d_until


def _copy_ends_at(c: Columns, cells: Cells, waiter: Columns) -> Bools:
    """True for waiters for whose expert, or GPU, a transfer ended in the very ns in which they were ready."""
    copies, crossings = c.where(c.of("demand", "prefetch", "swap")), c.where(c.of("hand_over"))
    keys = np.sort(cells.at(cells.expert(copies.home, copies.expert), copies.end))
    wanted = cells.at(cells.expert(waiter.home, waiter.expert), waiter.ready)
    handed = np.sort(cells.at(cells.layer(crossings.step, crossings.home), crossings.end))
    entered = cells.at(cells.layer(waiter.step, waiter.home), waiter.ready)
    return among(keys, wanted) | among(handed, entered)


def _cpu_part(c: Columns, cells: Cells, combine: Columns) -> tuple[Ints, Ints]:
    """Last end of the CPU experts of every combine, and of any part that came without a span on the GPU; else -1.

    Deferred experts are those of the next layer's combine. Only what ended by the combine's ``ready_ns`` counts: it did
    not wait for anything later (a dropped precomputation).
    """
    place = np.argsort(cells.layer(combine.step, combine.layer), kind="stable")
    layers = cells.layer(combine.step, combine.layer)[place]
    cpu_end, part_end = np.full((2, len(layers)), -1, dtype=np.int64)
    ready = combine.ready[place]
    on_cpu, copied = c.where(c.on("cpu") & ~c.of("gate_up")), c.where(c.of("result", "demand", "hand_over"))
    _latest(cpu_end, layers, ready, on_cpu, cells.layer(on_cpu.step, on_cpu.home) + on_cpu.of("deferred"))
    _latest(part_end, layers, ready, copied, cells.layer(copied.step, copied.home))
    part_end = np.maximum(part_end, cpu_end)
    back = np.argsort(place, kind="stable")
    return cpu_end[back], part_end[back]


def _latest(into: Ints, layers: Ints, ready: Ints, spans: Columns, keys: Ints) -> None:
    """Raise ``into`` to the last end of ``spans`` of each of the sorted ``layers``, not later than ``ready``; ``keys``
    are the layers of the spans."""
    place = np.minimum(first_at_or_after(layers, keys), len(layers) - 1)
    mine = (layers[place] == keys) & (spans.end <= ready[place])
    np.maximum.at(into, place[mine], spans.end[mine])
