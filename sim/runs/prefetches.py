"""Outcomes of prefetches, and the bytes that they copied."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.runs.columns import Bools, Cells, Columns, Ints, among, first_at_or_after
from sim.runs.hits import Uses, memory_of


class Prefetches(NamedTuple):
    """Every prefetch that started, in order; exactly one of used, late and wasted holds for each."""

    step: Ints
    decode: Bools
    size_bytes: Ints
    used: Bools  # had arrived when the layer that ran it on the GPU was routed
    late: Bools  # ran on the GPU, but arrived after its layer was routed
    wasted: Bools  # left memory, or the run ended, before the GPU ran it
    active: Bools  # its expert was active when its layer's next plan took effect, wherever it ran


def prefetches_of(c: Columns, cells: Cells, uses: Uses) -> Prefetches:
    """Outcomes of all prefetches that started, given the uses of all experts."""
    copies = c.where(c.of("prefetch"))
    expert = cells.expert(copies.home, copies.expert)
    use_start, routed = _first_use(uses, cells, expert, copies.end)
    used = (use_start >= 0) & (use_start <= memory_of(c, cells).left_after(cells, expert, copies.end))
    late = used & (routed < copies.end)
    active = _active(c, cells, uses, copies)
    return Prefetches(copies.step, copies.decode, copies.size_bytes, used & ~late, late, ~used, active)


def _first_use(uses: Uses, cells: Cells, expert: Ints, after: Ints) -> tuple[Ints, Ints]:
    """The first GPU run of each expert from ``after`` on: its start, and when its layer was routed; -1 without one."""
    runs = np.flatnonzero(uses.on_gpu)
    run = cells.expert(uses.layer[runs], uses.expert[runs])
    keys = cells.at(run, uses.start[runs])
    order = np.argsort(keys, kind="stable")
    row = np.append(order, -1)[first_at_or_after(keys[order], cells.at(expert, after))]
    found = (row >= 0) & (np.append(run, -1)[row] == expert)
    start, routed = (np.append(times[runs], -1)[row] for times in (uses.start, uses.routed))
    return np.where(found, start, -1), np.where(found, routed, -1)


def _active(c: Columns, cells: Cells, uses: Uses, copies: Columns) -> Bools:
    """Whether each copied expert was active in the next run of its layer: whose plan took effect at or after the start
    of the copy, which may have started while that plan was being made.
    """
    plans = c.where(c.of("plan"))
    keys = plans.layer * cells.horizon + plans.end
    order = np.argsort(keys, kind="stable")
    row = np.append(order, -1)[first_at_or_after(keys[order], copies.home * cells.horizon + copies.start)]
    found = (row >= 0) & (np.append(plans.layer, -1)[row] == copies.home)
    step = np.append(plans.step, 0)[row]
    active = cells.use(uses.step, uses.layer, uses.expert)  # in order
    return np.asarray(found & among(active, cells.use(step, copies.home, copies.expert)))
